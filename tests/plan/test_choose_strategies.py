"""Rules of the planner's choice: the least time among the possible, and predictions stay those of the default."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.core.errors import PlanError
from isthmus.core.model import Model, load_model
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.plan import choose_strategies, predict
from tests.plan.plans import staged

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model() -> Model:
    """A model of 80 layers."""
    return load_model(str(ROOT / "docs/guide/example/config.json"))


def pool(*aggregators: dict[str, object], gbps: float = 50.0) -> Pool:
    """Return a pool of one cluster of 4 nodes with 8 chips."""
    group = {"name": "g", "chip": "H100", "nodes": 4, "chips_per_node": 8, "network_gbps": gbps}
    return Pool.model_validate(
        {"clusters": [{"name": "a", "owner": "o", "node_groups": [group], "aggregators": list(aggregators)}]}
    )


def plan(dp: int = 16) -> Plan:
    """Return `dp` replicas of one stage on 2 chips: 4 nodes with 4 replicas each."""
    return staged((80,), dp=dp, clusters="a", tp=2)


def test_without_aggregators_the_default_is_chosen(model: Model) -> None:
    """Its time is the torus'; the sentence names what is missing; the prices of all possible are there."""
    (choice,) = choose_strategies(plan(), pool(), model)
    assert choice.name == "default"
    times = {time.strategy: time.total_s for time in choice.prices.times}
    assert times["2d-torus"] == pytest.approx(choice.prices.default_s, rel=0.02)
    assert choice.seconds == choice.prices.default_s
    assert "no strategy is faster" in choice.why
    assert "a server or switch find none there" in choice.why
    assert choice.as_dict()["impossible"].keys() == {"parameter-server", "psring", "passing", "switchml", "atp"}


def test_a_switch_makes_passing_the_fastest(model: Model) -> None:
    """4 hosts send K in place of 1.5 K; the workers' cards bind."""
    (choice,) = choose_strategies(plan(), pool({"kind": "switch"}), model)
    assert choice.name == "passing"
    assert choice.fastest.bound == "worker"
    assert choice.seconds < 0.9 * choice.prices.default_s
    assert f"by passing ({choice.as_dict()['strategies']['passing']['seconds']:.1f} s" in choice.why


def test_few_slots_or_a_slow_switch_lose(model: Model) -> None:
    """The switch's own limits are priced: slots for a round trip, and the rate of all its ports."""
    for limits in ({"slots": 32}, {"network_gbps": 10.0}):
        (choice,) = choose_strategies(plan(), pool({"kind": "switch", **limits}), model)
        assert choice.name == "default"
    (choice,) = choose_strategies(plan(), pool({"kind": "switch", "network_gbps": 10.0}), model)
    assert {time.strategy: time.bound for time in choice.prices.times}["passing"] == "aggregator"


def test_many_servers_with_fast_cards_make_psring_possible_and_atp_needs_both(model: Model) -> None:
    """Each kind opens its own strategies."""
    (choice,) = choose_strategies(plan(), pool({"kind": "server", "count": 8, "network_gbps": 3200.0}), model)
    possible = {time.strategy: time.bound for time in choice.prices.times}
    assert possible["psring"] == "worker"
    assert "passing" not in possible
    (choice,) = choose_strategies(plan(), pool({"kind": "server"}, {"kind": "switch"}), model)
    assert {time.strategy for time in choice.prices.times} >= {"atp", "passing", "psring"}


def test_predictions_are_those_of_what_the_runtime_executes(model: Model) -> None:
    """Aggregators in the pool change no prediction unless a strategy is forced."""
    plain, switched = pool(), pool({"kind": "switch"})
    default_s = predict(plan(), plain, model).iteration_s
    assert predict(plan(), switched, model).iteration_s == default_s
    forced = predict(plan(), switched, model, synchronisation="passing")
    (choice,) = choose_strategies(plan(), switched, model)
    assert default_s - forced.iteration_s == pytest.approx(choice.prices.default_s - choice.seconds)
    assert "gradients are summed by 'passing'" in forced.assumptions
    with pytest.raises(PlanError, match="needs a switch: cluster 'a' has none"):
        predict(plan(), plain, model, synchronisation="passing")


def test_one_replica_has_no_group(model: Model) -> None:
    """Nothing is summed."""
    assert choose_strategies(plan(dp=1), pool(), model) == ()


@pytest.mark.parametrize(
    ("aggregators", "message"),
    [
        ([{"kind": "switch"}, {"kind": "switch", "count": 2}], "'switch' appears twice"),
        ([{"kind": "server", "slots": 8}], "a server has no slots"),
        ([{"kind": "router"}], "'server' or 'switch'"),
        ([{"kind": "switch", "count": 0}], "greater than or equal to 1"),
    ],
)
def test_bad_aggregators_are_refused(aggregators: list[dict[str, object]], message: str) -> None:
    """One entry per kind, slots on switches only, known kinds, counts from 1 on."""
    with pytest.raises(ValueError, match=message):
        pool(*aggregators)
