"""Rules of planned rollouts: who decodes, how many sequences at once, which way the weights take, what a step takes."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._rollout_plans import sequence_advice
from isthmus.core.job import Job
from isthmus.core.job_parts.rl_job import RlConfig
from isthmus.core.model import load_model
from isthmus.core.plan import Plan, PlanSet, Prediction
from isthmus.core.pool import Pool
from isthmus.plan import ModelProfile, RolloutRequest, choose_rollouts, predict, profile_model, training_choices
from isthmus.plan.rollouts.advise_sequences import MAX_SEQUENCES, advise_sequences
from isthmus.plan.rollouts.decode_option import DecodeOption, decode_option
from isthmus.plan.rollouts.estimate_step import estimate_step_s
from isthmus.plan.rollouts.response_lengths import response_lengths
from isthmus.plan.rollouts.weights_ways import LinkRate, weights_ways
from isthmus.sim import simulate_rollouts

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 32000, "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}  # fmt: skip
RL = {"group": 4, "max_prompt_tokens": 32, "max_response_tokens": 224, "max_staleness": 1, "reward": {"exact": True}}


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> ModelProfile:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return profile_model(load_model(folder))


def make_job(**changes: Any) -> Job:
    return Job.model_validate(
        {
            "name": "sums", "task": "rl", "model": "m", "rl": RL | changes.pop("rl", {}),
            "data": {"paths": ["p.jsonl"], "format": "prompts", "tokenizer": "bytes"},
            "training": {"steps": 9, "sequence_length": 256, "global_batch_size": 64, "learning_rate": 1e-6},
            "output": "o", **changes,
        }
    )  # fmt: skip


def make_pool(*links: tuple[str, str, float, float], chips: dict[str, tuple[str, int]] | None = None) -> Pool:
    """Return clusters of one node; a link has its ends, Gbit/s and round trip in ms."""
    given = chips or {"a": ("H100", 8), "b": ("A100", 4), "c": ("A100", 4)}
    return Pool.model_validate(
        {
            "version": 1,
            "clusters": [
                {"name": name, "owner": name, "node_groups": [{"chip": chip, "nodes": 1, "chips_per_node": count}]}
                for name, (chip, count) in given.items()
            ],
            "links": [
                {"between": [a, b], "bandwidth_gbps": rate, "round_trip_ms": late} for a, b, rate, late in links
            ],
        }
    )  # fmt: skip


def trained_plan(cluster: str, iteration_s: float, chips: int = 8) -> Plan:
    """Return a plan that trains at one cluster, with a prediction."""
    found = Prediction(
        iteration_s=iteration_s, tgs_tokens_per_card_s=1, samples_per_s=64 / iteration_s, peak_memory_bytes=(10**10,),
        cost_per_iteration=iteration_s * chips,
    )  # fmt: skip
    stages = [
        {"replica": number, "cluster": cluster, "node_group": "h100", "layers": (0, 16)} for number in range(chips)
    ]  # fmt: skip
    return Plan.model_validate(
        {"id": f"at-{cluster}", "stages": stages, "dp": chips, "micro_batches": 64 // chips, "micro_batch_size": 1,
         "sequence_length": 256, "predicted": found}
    )  # fmt: skip


LINKS = (("a", "b", 1.0, 20.0), ("a", "c", 0.1, 50.0), ("b", "c", 1.0, 20.0))


def group_of(pool: Pool, cluster: str) -> str:
    return pool.cluster(cluster).node_groups[0].name


def test_without_roles_the_planner_chooses_them_and_says_why(profile: ModelProfile) -> None:
    """The cluster that trains does not decode; bytes, idle seconds and cost are those of the whole step."""
    pool = make_pool(*LINKS)
    plan = trained_plan("a", 6.0)
    request = RolloutRequest(job=make_job(), pool=pool, profile=profile)
    found = choose_rollouts(request, PlanSet(plans=(plan,)))
    best = found.plans[0]
    assert best.predicted is not None
    made = best.predicted.rollouts
    assert made is not None
    assert best.rollouts
    assert {one.cluster for one in best.rollouts} <= {"b", "c"}
    assert all(one.sequences and one.cache_tokens for one in best.rollouts)
    assert "decodes at b" in best.why
    assert "max_staleness 0" in best.why
    assert best.predicted.iteration_s == pytest.approx(made.train_s + made.wait_samples_s, rel=0.02)
    assert made.link_bytes["a>b"] >= 0.9 * made.weights_bytes
    assert made.link_bytes["b>a"] > 0
    assert best.predicted.cost_per_iteration > 0
    in_turns = next(one for one in found.plans if not one.rollouts)
    assert "in turns" in in_turns.why
    steps_s = [one.predicted.iteration_s for one in found.plans if one.predicted]
    assert min(steps_s) * 1.005 >= steps_s[0]


def test_named_roles_are_kept_and_a_missing_link_is_named(profile: ModelProfile) -> None:
    """`placement.rollouts` decode a rank each; `placement.train` alone decodes in turns."""
    pool = make_pool(*LINKS[:1])
    plan = trained_plan("a", 2.0)
    for names, reason in ((["c"], "no link between a and c"), (["d"], "the pool has no cluster 'd'"),
                          (["a"], "a has no free chip")):  # fmt: skip
        job = make_job(placement={"train": ["a"], "rollouts": names})
        found = choose_rollouts(RolloutRequest(job=job, pool=pool, profile=profile), PlanSet(plans=(plan,)))
        assert not found.plans
        assert reason in found.refused[0].reason
    named = make_job(placement={"train": ["a"], "rollouts": ["b"]})
    (one,) = choose_rollouts(RolloutRequest(job=named, pool=pool, profile=profile), PlanSet(plans=(plan,))).plans
    assert [place.cluster for place in one.rollouts] == ["b"]
    alone = make_job(placement={"train": ["a"]})
    (one,) = choose_rollouts(RolloutRequest(job=alone, pool=pool, profile=profile), PlanSet(plans=(plan,))).plans
    assert not one.rollouts


def test_every_cluster_may_train_where_no_role_is_named() -> None:
    """Of three clusters every set, of more each of the largest alone; named ones stay."""
    pool = make_pool(*LINKS)
    sets = [job.placement.clusters for job in training_choices(make_job(), pool)]
    assert sets[0] == ()
    assert {frozenset(one) for one in sets[1:]} == {
        frozenset(some) for size in (1, 2) for some in itertools.combinations("abc", size)
    }
    assert len(list(training_choices(make_job(placement={"train": ["a"]}), pool))) == 1
    named = list(training_choices(make_job(placement={"rollouts": ["b"]}), pool))
    assert [one.placement.clusters for one in named] == [(), ("a", "c")]


def test_weights_take_the_widest_way_and_relay() -> None:
    """c has a thin link from a and a wide one from b: its version comes by b, at the pace of the slowest link."""
    rates = {("a", "b"): 100.0, ("b", "a"): 100.0, ("a", "c"): 10.0, ("b", "c"): 50.0}
    given = {ends: LinkRate(bytes_per_s=rate, delay_s=0.01) for ends, rate in rates.items()}
    found = weights_ways("a", {"b", "c", "d"}, given, 1000.0, 0.0)
    assert found["b"].clusters == ("a", "b")
    assert found["c"].clusters == ("a", "b", "c")
    assert found["c"].way.occupied_s == pytest.approx(20.0)
    assert found["c"].way.delay_s == pytest.approx(0.02)
    assert "d" not in found


@pytest.mark.parametrize("seed", [5, 7])
def test_advised_sequences_evict_none_and_reach_most_of_the_throughput(seed: int) -> None:
    """In a small cache, by the engine's own scheduler: no eviction, 90 % of what up to 3 times as many reach."""
    found = sequence_advice(seed, 200)
    assert found.evictions == 0
    assert found.throughput_ratio >= 0.9


def test_forward_passes_beside_training_take_their_time(profile: ModelProfile) -> None:
    """One for recomputed old log-probabilities, one for `kl`; each is about the third of a step that is forward."""
    pool = make_pool(*LINKS)
    stages = [{"cluster": "a", "node_group": "h100", "layers": layers} for layers in ((0, 8), (8, 16))]
    for shape in (stages, [stages[0] | {"layers": (0, 16)}]):
        plan = Plan.model_validate(
            {"id": "p", "stages": shape, "micro_batches": 16, "micro_batch_size": 4, "sequence_length": 256}
        )
        step_s = predict(plan, pool, profile).iteration_s
        given = plan.model_copy(update={"predicted": Prediction(
            iteration_s=step_s, tgs_tokens_per_card_s=1, samples_per_s=1, peak_memory_bytes=(10**10,)
        )})  # fmt: skip
        added_s = []
        for rl in ({}, {"old": "recomputed"}, {"old": "recomputed", "kl": 0.1}):
            request = RolloutRequest(job=make_job(rl=rl), pool=pool, profile=profile)
            option = decode_option(request, given, ())
            assert isinstance(option, DecodeOption)
            added_s.append(option.pipeline.train_s - step_s)
        assert added_s[0] == 0
        assert 0.25 * step_s < added_s[1] < 0.4 * step_s
        assert added_s[2] == pytest.approx(2 * added_s[1])


@given(seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_advised_sequences_fit_the_cache_at_every_moment(seed: int) -> None:
    """On average, prompts included; twice the room takes no fewer, and room for the longest takes one."""
    drawn = random.Random(seed)
    lengths = [max(1, int(drawn.expovariate(1 / 60))) for _ in range(100)]
    room, prompt = drawn.randint(500, 20000), drawn.randint(1, 40)
    slots = advise_sequences(room, prompt, lengths, 512)
    assert 0 <= slots <= MAX_SEQUENCES
    assert slots * prompt <= room
    assert advise_sequences(room * 2, prompt, lengths, 512) >= slots
    if room >= prompt + max(lengths) + 16:
        assert slots >= 1


def test_lengths_are_measured_or_assumed() -> None:
    """Without any the mean is about a quarter of the longest (within a tenth), and none is longer."""
    config = RlConfig.model_validate(RL | {"max_response_tokens": 1000})
    assumed = response_lengths(config)
    assert sum(assumed) / len(assumed) == pytest.approx(250, rel=0.1)
    assert max(assumed) <= 1000
    assert response_lengths(config.model_copy(update={"lengths": (5, 6)})) == (5, 6)
    with pytest.raises(ValueError, match="max_response_tokens is 224"):
        RlConfig.model_validate(RL | {"lengths": [225]})


def test_the_closed_form_ranks_as_the_simulator_does(profile: ModelProfile) -> None:
    """Over random pools the option that it ranks first is within a tenth of the simulated best."""
    for seed in range(6):
        drawn = random.Random(seed)
        kinds = ("A100", "H100", "V100")
        chips = {"a": ("H100", 8)} | {name: (drawn.choice(kinds), drawn.randint(1, 4)) for name in "bc"}
        pool = make_pool(*((a, b, drawn.choice((0.1, 1.0, 10.0)), 20.0) for a, b in itertools.combinations("abc", 2)),
                         chips=chips)  # fmt: skip
        plan = trained_plan("a", drawn.uniform(0.5, 20.0))
        job = make_job(rl={"max_staleness": drawn.choice((0, 1, 4))})
        request = RolloutRequest(job=job, pool=pool, profile=profile)
        places = [(name, group_of(pool, name), chips[name][1]) for name in "bc"]
        options = [
            decode_option(request, plan, some) for size in (0, 1, 2) for some in itertools.combinations(places, size)
        ]
        made = [one.pipeline for one in options if isinstance(one, DecodeOption)]
        assert len(made) == 4
        steps_s = [simulate_rollouts(one).step_s for one in made]
        first = min(range(4), key=lambda at: estimate_step_s(made[at]))
        assert steps_s[first] <= 1.1 * min(steps_s)


def test_the_runtime_decodes_as_many_as_the_plan_says() -> None:
    """`RolloutPlace.sequences` is what an engine tells the ledger, up to the most rows of a step."""
    open_engine = pytest.importorskip("isthmus.rl.rollout.open_engine")
    from isthmus.core.plan_parts.rollout_place import RolloutPlace

    assert open_engine.MAX_ROWS == MAX_SEQUENCES
    place = RolloutPlace(cluster="b", node_group="g", sequences=7)
    assert open_engine.engine_slots(make_job(), 2, place) == 7
    assert open_engine.engine_slots(make_job(), 2) == 64
