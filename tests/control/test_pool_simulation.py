"""What a simulated pool does with a trace: everything ends, the same seed gives the same, owners gain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.control.simulation.compare_scenarios import ScenarioComparison, compare_scenarios
from isthmus.control.simulation.delays import Delays
from isthmus.control.simulation.pool_outcome import percentile
from isthmus.control.simulation.pool_simulation import PoolSimulation
from isthmus.control.simulation.traces.generate_trace import generate_trace
from isthmus.control.simulation.traces.job_trace import Trace, TraceJob
from isthmus.control.simulation.traces.trace_pools import assign_owners, make_trace_pool
from isthmus.control.state.invariants import violations
from isthmus.core.messages.agent_messages import AgentOrders, PartOrder
from isthmus.core.owner.owner_policy import OpeningHours, OwnerPolicy
from isthmus.core.plan import Plan, Stage
from isthmus.core.pool import Cluster, Link, NodeGroup, Pool
from isthmus.site import OrdersReceived
from tests.control.samples import submission

pytestmark = pytest.mark.integration

TRACE = generate_trace({"a": 64, "b": 128}, seed=4, num_jobs=25, load=0.9)
POOL = make_trace_pool(TRACE, load=0.9, owners=2)


def _cluster(name: str, nodes: int) -> Cluster:
    group = NodeGroup(name="g", chip="H20", nodes=nodes, chips_per_node=8)
    return Cluster(name=name, owner=name, node_groups=(group,))


def _two(nodes: int = 1) -> Pool:
    links = (
        Link(source="a", target="b", bandwidth_gbps=100, delay_ms=5),
        Link(source="b", target="a", bandwidth_gbps=100, delay_ms=5),
    )
    return Pool(clusters=(_cluster("a", nodes), _cluster("b", nodes)), links=links)


def _job(name: str, submit_s: float = 0.0, run_s: float = 100.0, workers: int = 1, owner: str = "a") -> TraceJob:
    return TraceJob(name=name, owner=owner, submit_s=submit_s, run_s=run_s, workers=workers, chips_per_worker=8)


@pytest.mark.parametrize("scenario", ["alone", "home", "pool"])
def test_every_job_that_fits_ends_and_no_chip_is_left_held(scenario: str) -> None:
    """At the end of a trace every job has ended, and the sites have nothing of the pool's."""
    jobs, pool = assign_owners(TRACE, POOL)
    world = PoolSimulation(pool, jobs, scenario=scenario, check_invariants=_holds)
    world.run()
    outcome = world.outcome()
    assert outcome.whole
    assert outcome.pool.done + outcome.too_large == len(jobs)
    world.kernel.run(world.kernel.now_s + 60)
    for agent in world.agents.values():
        assert agent.idle
        assert agent.machine.free_chips() == {group.name: group.num_chips for group in agent.cluster.node_groups}


def _holds(server: object, now_s: float) -> None:
    assert violations(server.coordinator.state, now_s, grace_s=2.0) == []  # type: ignore[attr-defined]


def test_the_same_seed_has_the_same_outcome() -> None:
    """Two runs of one question differ in nothing but the CPU seconds they took."""
    asked = ScenarioComparison(trace=TRACE, pool=POOL, node_mtbf_s=86_400.0, seed=7)
    one, other = ([_figures(run) for run in compare_scenarios(asked)] for _ in range(2))
    assert one == other
    assert any(run["failures"] for run in one)


def _figures(run: object) -> dict[str, object]:
    return {name: value for name, value in run.as_dict().items() if "cpu" not in name}  # type: ignore[attr-defined]


def test_a_job_too_large_for_its_owner_runs_across_two() -> None:
    """Two owners with a node each: alone a job of two nodes never runs, in the pool it takes both."""
    trace = Trace(jobs=(_job("big", workers=2),))
    alone, pooled = compare_scenarios(ScenarioComparison(trace=trace, pool=_two(), scenarios=("alone", "pool")))
    assert (alone.too_large, alone.pool.done) == (1, 0)
    assert (pooled.too_large, pooled.pool.done) == (0, 1)


def test_a_job_that_waits_at_home_starts_where_there_is_room() -> None:
    """The second job finds its owner's node taken, waits its 30 s, and runs at the other owner's."""
    trace = Trace(jobs=(_job("first", run_s=5000), _job("second", 10.0)))
    alone, home = compare_scenarios(ScenarioComparison(trace=trace, pool=_two(), scenarios=("alone", "home")))
    assert alone.pool.most_s == pytest.approx(4990, abs=1)
    assert 30 < home.pool.most_s < 45


def test_an_owners_own_job_gets_its_chips_back_from_the_pool() -> None:
    """The pool's job saves its work and makes way; its own lost time is what saving and going on take."""
    trace = Trace(
        jobs=(
            _job("guest-1", run_s=3000, owner="b"),
            _job("guest-2", 1.0, run_s=3000, owner="b"),
            _job("own", 500.0, run_s=100, owner="a"),
        )
    )
    (home,) = compare_scenarios(ScenarioComparison(trace=trace, pool=_two(), scenarios=("home",)))
    own = next(waits for waits in home.owners if waits.owner == "a")
    assert own.most_s < 20
    assert home.preemptions == 1
    assert home.ended_s < 3000 + 200


def test_a_job_that_an_owner_has_evicted_goes_on_at_another_site_that_is_free() -> None:
    """The owner of `a` needs its node for long: the guest goes on at `c`, though no more is free than when it came."""
    pool = Pool(clusters=(_cluster("a", 1), _cluster("b", 1), _cluster("c", 1)))
    jobs = (
        _job("long-b", run_s=9000, owner="b"),
        _job("guest", 1.0, run_s=3000, owner="b"),
        _job("own", 500.0, run_s=9000, owner="a"),
    )
    world = PoolSimulation(pool, jobs, scenario="home")
    world.run()
    outcome = world.outcome()
    assert outcome.preemptions == 1
    ended_s = world.job_outcomes["guest"].ended_s
    assert ended_s is not None
    assert ended_s < 3000 + 200


def test_who_is_lent_kept_chips_is_not_wounded_for_them() -> None:
    """A short job fills a gap before two that wait beyond patience: it runs, it is not requeued again and again."""
    pool = Pool(clusters=(_cluster("a", 3),))
    jobs = (
        _job("holds", run_s=9000),
        _job("ends", run_s=4005),
        _job("all", 1.0, run_s=100, workers=3),
        _job("long", 2.0, run_s=5000),
        _job("short", 4000.0, run_s=10),
    )
    world = PoolSimulation(pool, jobs)
    world.run()
    assert world.job_outcomes["short"].waited_s == pytest.approx(8, abs=4)
    assert world.server.event_counts["agent-reported"] < 60


def test_owners_of_a_trace_become_those_of_the_pool() -> None:
    """A job of an unknown owner is assigned to the one with the least demand per chip; unknown chips are any chips."""
    jobs = (_job("x", owner="a"), _job("y", run_s=900, owner="13"), _job("z", owner="57"))
    settled, pool = assign_owners(Trace(jobs=jobs), _two())
    assert [job.owner for job in settled] == ["a", "b", "a"]
    assert pool.clusters[0].priorities.levels[:2] == ("repair", "own")


def test_a_pool_for_a_trace_has_the_chips_it_asks_for() -> None:
    """Load 0.5 means twice the chips that the jobs keep busy."""
    jobs = tuple(_job(f"j{number}", number * 100.0) for number in range(101))
    pool = make_trace_pool(Trace(jobs=jobs), load=0.5, owners=3)
    assert [(one.name, one.node_groups[0].num_chips) for one in pool.clusters] == [("a", 24)]


def test_percentiles_are_values_that_occurred() -> None:
    """Nothing is interpolated; of nothing it is 0."""
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert percentile([1.0, 2.0], 0.95) == 2.0
    assert percentile([], 0.95) == 0.0


def test_a_gang_that_no_one_kind_of_chip_has_room_for_runs_as_unlike_pipelines() -> None:
    """Three nodes of H20 at one site and two of A100 at another: five workers, three and two stages, at once.

    Both sites have their parts, a gang of one kind is never mixed, and in the end nothing is held.
    """
    whole = _two(3)
    one, other = whole.clusters
    group = NodeGroup(name="x", chip="A100", nodes=2, chips_per_node=8)
    pool = whole.model_copy(update={"clusters": (one, other.model_copy(update={"node_groups": (group,)}))})
    mixed, picky = _job("mixed", workers=5), replace(_job("picky", submit_s=1.0, workers=2), chip="A100")
    plans = []

    def check(server: object, now_s: float) -> None:
        _holds(server, now_s)
        job = server.coordinator.state.jobs.get("mixed")  # type: ignore[attr-defined]
        if job is not None and job.plan is not None:
            plans.append(job.plan)

    world = PoolSimulation(pool, [mixed, picky], check_invariants=check)
    world.run()
    assert [(stage.replica, stage.cluster) for stage in plans[-1].stages] == [
        (0, "a"), (0, "a"), (0, "a"), (1, "b"), (1, "b"),
    ]  # fmt: skip
    sent = plans[-1].predicted.gradient_gbps
    assert sent == {"a>b": pytest.approx(0.52, rel=0.01), "b>a": pytest.approx(0.52, rel=0.01)}
    assert world.outcome().pool.done == 2
    assert world.job_outcomes["picky"].started_s >= world.job_outcomes["mixed"].ended_s, "all of b is the gang's"
    world.kernel.run(world.kernel.now_s + 60)
    assert all(agent.idle for agent in world.agents.values())


def _world(policy: OwnerPolicy, run_s: float = 3600.0, **delays: float) -> PoolSimulation:
    """One job on one site of its owner `a`, under the policy of that owner."""
    pool = Pool(clusters=(_cluster("a", 1),))
    jobs, pool = assign_owners(Trace(jobs=(_job("j", run_s=run_s),)), pool)
    return PoolSimulation(pool, jobs, policies={"a": policy}, delays=Delays(**delays))


def test_the_owners_hours_hold_in_the_simulator() -> None:
    """A job of three hours starts when the hours begin, is saved when they end, and ends the next day."""
    world = _world(
        OwnerPolicy(hours=(OpeningHours.model_validate({"from": "08:00", "to": "10:00"}),)), run_s=3 * 3600.0
    )
    world.run()
    fate = world.job_outcomes["j"]
    assert fate.started_s is not None
    assert 8 * 3600 <= fate.started_s < 8 * 3600 + 60
    assert fate.num_interruptions == 1
    assert fate.ended_s is not None
    assert 24 + 9 <= fate.ended_s / 3600 < 24 + 9.1


def test_a_user_whom_the_owner_does_not_let_in_gets_nothing_in_the_simulator() -> None:
    """The site refuses, as a real one does; the job never starts."""
    world = _world(OwnerPolicy(users=("somebody-else",)))
    world.run(until_s=3600)
    assert world.job_outcomes["j"].started_s is None


def test_a_site_that_shares_no_storage_copies_files_before_it_holds_devices() -> None:
    """A part whose job has trained elsewhere is prepared once its files have arrived."""
    world = PoolSimulation(_two(), (), scenario="alone", delays=Delays(file_fetch_s=300.0))
    site = world.agents["b"]
    order = PartOrder(
        job="j",
        attempt=2,
        desired="prepared",
        lease_s=1000.0,
        spec=submission().job,
        plan=Plan(
            id="p",
            stages=(Stage(cluster="b", node_group="g", layers=(0, 4)),),
            micro_batches=1,
            micro_batch_size=1,
            sequence_length=64,
        ),
        files_at=("a",),
    )
    site.handle(OrdersReceived(now_s=0.0, orders=AgentOrders(parts=(order,))))
    world.kernel.run(299.0)
    assert site.parts["j", 2].state == "evicting"
    world.kernel.run(301.0)
    assert site.parts["j", 2].state == "prepared"
