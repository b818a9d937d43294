"""Jobs whose plan has unlike replicas: what they are offered and promised, and that all start or none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.control.placement import FreeResources, PlanRequest
from isthmus.control.placement.place_plan import place_plan
from isthmus.control.placement.propose_plans import propose_plans
from isthmus.control.placement.relocate_plan import relocate_plan
from isthmus.control.placement.resources.plan_requirement import plan_requirement_of
from isthmus.core.job import PlacementConstraints
from isthmus.core.model import load_model
from isthmus.core.plan import Plan, PlanSet
from isthmus.core.pool import Pool
from isthmus.plan import profile_model
from tests.control.driver import seen
from tests.control.samples import plan
from tests.control.test_coordinator_allocations import linked, predicted
from tests.e2e.site import CONFIG, clusters_of, make_job

UNLIKE = "aa|b"


def pool_of(**changes: float) -> Pool:
    """Clusters of two cores for half of the model each, and one of a core for all of it; links may differ."""
    given = clusters_of({"north": 2, "south": 1, "west": 2}, 2.5e-4)
    given["clusters"][1]["node_groups"][0]["virtual"]["memory_scale"] = 1e-3
    for link in given["links"]:
        link.update(changes)
    return Pool.model_validate(given)


def asked(folder: Path, pool: Pool, **free: int) -> PlanRequest:
    """The job of 24 samples on the chips that are free: all, unless it is said of a cluster."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    job = make_job(folder, "unlike", placement={"clusters": ["north", "south", "west"]})
    sizes = {"sequence_length": 64, "global_batch_size": 24}
    job = job.model_copy(update={"training": job.training.model_copy(update=sizes)})
    chips = {one.name: {"cpu": free.get(one.name, one.node_groups[0].num_chips)} for one in pool.clusters}
    return PlanRequest(job=job, model=load_model(folder / "model"), pool=pool, free_chips=chips)


def unlike(found: PlanSet) -> list[Plan]:
    """Return the plans whose replicas are a pipeline of two stages and one of one."""
    return [one for one in found.plans if [len(one.pipeline(r)) for r in range(one.dp)] in ([2, 1], [1, 2])]


def test_a_job_is_offered_unlike_replicas_and_told_what_their_gradients_send(tmp_path: Path) -> None:
    """Two chips that hold half a model each and one that holds it all: a replica at either owner."""
    found = unlike(propose_plans(asked(tmp_path, pool_of(), west=0)))
    assert found
    assert found[0].clusters in (("north", "south"), ("south", "north"))
    assert len(set(found[0].replica_micro_batches)) == 2
    seen_of = found[0].predicted
    assert seen_of is not None
    assert set(seen_of.gradient_gbps) == {"north>south", "south>north"}
    assert f"gradients from north to south need {seen_of.gradient_gbps['north>south']:.3g}" in found[0].why
    profile = profile_model(load_model(tmp_path / "model"))
    sent = 8 * 4 * profile.num_parameters / 1e9 / seen_of.iteration_s
    assert seen_of.gradient_gbps["north>south"] == pytest.approx(sent, rel=0.05), "once each way, headers too"


def test_a_link_that_gradients_would_bind_is_not_offered(tmp_path: Path) -> None:
    """Over a hundredth of the bandwidth the sum of gradients would take longer than all micro-batches."""
    assert unlike(propose_plans(asked(tmp_path, pool_of(bandwidth_gbps=0.01), west=0))) == []


def test_the_same_replicas_are_placed_elsewhere(tmp_path: Path) -> None:
    """With the north in use the pipeline of two stages goes west; stages, layers and counts stay."""
    where = pool_of()
    request = asked(tmp_path, where, west=0)
    pattern, profile = unlike(propose_plans(request))[0], profile_model(request.model)
    demand = plan_requirement_of(pattern, request.job, profile, where)
    assert [one.requirement.num_stages for one in demand.groups] in ([2, 1], [1, 2])
    free = FreeResources.from_pool(where, {"north": {"cpu": 1}, "south": {"cpu": 1}, "west": {"cpu": 2}})
    places = place_plan(demand, free, PlacementConstraints())
    assert [set(one.clusters) for one in places.candidates] == [{"south", "west"}]
    moved = relocate_plan(pattern, places.candidates[0], demand, free, request.job, profile, where)
    assert moved.replica_micro_batches == pattern.replica_micro_batches
    west = {"north": "west", "south": "south"}
    assert [(s.replica, s.layers, west[s.cluster]) for s in pattern.stages] == [
        (s.replica, s.layers, s.cluster) for s in moved.stages
    ]
    assert "gradients from south to west need" in moved.why


def test_gradients_between_replicas_are_promised_with_the_chips() -> None:
    """What they take of a link is not available to the next job until it is released."""
    pool = linked(1.0, "a", "b")
    first = predicted(plan(*UNLIKE))
    rates = {"gradient_gbps": {"a>b": 0.7, "b>a": 0.7}}
    first = first.model_copy(update={"predicted": first.predicted.model_copy(update=rates)})  # type: ignore[union-attr]
    pool.submit("one", first)
    pool.submit("two")
    assert pool.asked["two"].free_gbps == {"a>b": pytest.approx(0.3), "b>a": pytest.approx(0.3)}
    pool.answer("two", first)
    assert pool.state("two") == "waiting"
    assert "the link a>b has 0.3 Gbit/s left of the 0.7 needed" in pool.reason("two")
    pool.cancel("one")
    pool.obey()
    assert pool.state("two") == "preparing"


def test_unlike_replicas_start_all_or_none() -> None:
    """1. `b` has no room: nothing is held at `a` either. 2. It has: all are prepared, then all run, each rank
    where the plan says. 3. A replica that cannot be had any more releases the other.
    """
    pool = linked(1.0, "a", "b")
    pool.report("b", free=0)
    pool.submit("one", predicted(plan(*UNLIKE)))
    assert pool.state("one") != "preparing"
    assert all(order.desired in ("queued", "released") for order in pool.coordinator.orders("a"))
    pool.report("b", seen("one", 1, "queued"), free=4)
    assert pool.state("one") == "preparing"
    pool.obey()
    pool.obey()
    assert {order.desired for site in "ab" for order in pool.coordinator.orders(site)} == {"running"}
    parts = {part.cluster: part.ranks for part in plan(*UNLIKE).parts()}
    assert parts == {"a": (0, 1), "b": (2,)}
    pool.report("b", seen("one", 1, "failed"))
    assert {order.desired for order in pool.coordinator.orders("a")} == {"released"}
