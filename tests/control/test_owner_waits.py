"""An owner's own users in the pool beside alone: known answers, equality without a pool, and who may ask."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.control.simulation.compare_waits import (
    ALONE_DELAYS,
    MAX_COMPARED_JOBS,
    compare_waits,
    wait_verdict,
)
from isthmus.control.simulation.pool_simulation import PoolSimulation
from isthmus.control.simulation.traces.job_trace import TraceJob
from isthmus.core.errors import InputError
from isthmus.core.pool import Cluster, Link, NodeGroup, Pool, VirtualChip
from isthmus.core.views.wait_views import OwnerWaits, WaitedJob, WaitedJobsPage, WaitFigures

HOUR_S = 3600.0
MONTH = "2027-01"
BEGIN_S = 1_798_761_600.0  # 2027-01-01T00:00:00Z


def cluster(name: str, chip: str = "H20", nodes: int = 1) -> Cluster:
    """A cluster of its own owner with nodes of 8 chips."""
    group = NodeGroup(name="g", chip=chip, nodes=nodes, chips_per_node=8)
    return Cluster(name=name, owner=name, node_groups=(group,))


BUSY, IDLE = cluster("busy"), cluster("idle")
LINKS = tuple(Link(source=a, target=b, bandwidth_gbps=100, delay_ms=5) for a, b in (("busy", "idle"), ("idle", "busy")))


def waited(name: str, at_s: float, waited_s: float, ran_s: float = HOUR_S, **more: object) -> WaitedJob:
    """A job of 8 chips that ended, unless it says otherwise."""
    wanted = {"job": name, "user": "ann", "submitted_s": BEGIN_S + at_s, "waited_s": waited_s, "ran_s": ran_s,
              "started": True, "open": False, "chips": 8}  # fmt: skip
    return WaitedJob.model_validate(wanted | more)


def page(owner: str, *jobs: WaitedJob, month_over: bool = True) -> WaitedJobsPage:
    """All jobs of an owner's only user."""
    return WaitedJobsPage(owner=owner, num_users=1, month_over=month_over, jobs=jobs)


def compared(owner: str, *jobs: WaitedJob, month_over: bool = True) -> OwnerWaits:
    """The comparison in the pool of both owners."""
    return compare_waits(page(owner, *jobs, month_over=month_over), MONTH, (BUSY, IDLE), LINKS)


def test_jobs_that_the_neighbour_ran_at_once_would_have_queued_alone() -> None:
    """Four jobs of an hour on one node: alone they wait 0, 1, 2 and 3 hours; in the pool two ran at a time."""
    found = compared("busy", *(waited(f"j{at}", at, at // 2 * HOUR_S) for at in range(4)))
    assert (found.compared, found.never_alone, found.verdict, found.final) == (4, 0, "better", True)
    assert found.pool == WaitFigures(mean_s=HOUR_S / 2, median_s=0.0, p95_s=HOUR_S)
    assert found.alone is not None
    assert found.alone.mean_s == pytest.approx(1.5 * HOUR_S, abs=60)
    assert found.alone.median_s == pytest.approx(HOUR_S, abs=60)
    assert found.alone.p95_s == pytest.approx(3 * HOUR_S, abs=60)


def test_an_owner_whose_chips_others_held_is_worse_off() -> None:
    """The only job of the idle owner waited an hour for a guest; alone it would have started at once."""
    found = compared("idle", waited("j", 0, HOUR_S))
    assert found.verdict == "worse"
    assert found.alone is not None
    assert found.alone.mean_s < 60


def test_jobs_larger_than_the_owner_are_told_apart() -> None:
    """16 chips, and a kind of chip that the owner lacks: both run in the pool only, and do not enter the comparison."""
    found = compared(
        "busy", waited("fits", 0, 5), waited("large", 1, 100, chips=16), waited("kind", 2, 300, kinds=["H100"])
    )
    assert (found.compared, found.never_alone) == (1, 2)
    assert found.pool_only == WaitFigures(mean_s=200, median_s=100, p95_s=300)
    assert found.pool == WaitFigures(mean_s=5, median_s=5, p95_s=5)


def test_a_job_that_still_waits_counts_with_its_wait_so_far() -> None:
    """It has waited two hours where alone it would have begun at once: the owner is worse off, so far."""
    found = compared("busy", waited("j", 0, 2 * HOUR_S, ran_s=0, started=False, open=True))
    assert (found.verdict, found.open, found.final) == ("worse", 1, False)
    assert not compared("busy", waited("j", 0, 0), month_over=False).final


def test_a_job_that_is_seen_for_a_minute_does_not_count_for_longer_alone() -> None:
    """Both the pool's wait and the one alone end where the job was last seen."""
    first, withdrawn = waited("a", 0, 0), waited("b", 1, 50, ran_s=0, started=False)
    found = compared("busy", first, withdrawn)
    assert found.alone is not None
    assert found.alone.p95_s == 50


def test_jobs_without_a_plan_are_counted_and_left_out() -> None:
    """Without jobs that have chips there is nothing to compare."""
    found = compared("busy", waited("j", 0, 7, chips=0, started=False))
    assert (found.jobs, found.unsized, found.compared, found.verdict) == (1, 1, 0, "no comparison")
    assert (found.pool, found.alone, found.pool_only) == (None, None, None)
    assert compared("busy").verdict == "no comparison"


def test_chips_that_the_catalogue_lacks_are_simulated() -> None:
    """A pool may define chips of its own, which the view of the pool does not repeat."""
    own = cluster("own", chip="Homemade")
    found = compare_waits(page("own", waited("j", 0, 0, kinds=["Homemade"])), MONTH, (own,))
    assert (found.compared, found.verdict) == (1, "equal")


def test_virtual_chips_are_simulated_like_real_ones() -> None:
    """Emulated chips are chips of their model."""
    group = NodeGroup(name="g", chip="H20", nodes=1, chips_per_node=8, virtual=VirtualChip())
    own = Cluster(name="own", owner="own", node_groups=(group,))
    assert compare_waits(page("own", waited("j", 0, 0)), MONTH, (own,)).verdict == "equal"


def test_jobs_span_the_clusters_of_their_owner() -> None:
    """16 chips fit two linked clusters of 8, not two that are not linked."""
    both = (cluster("a"), cluster("b"))
    own = [one.model_copy(update={"owner": "own"}) for one in both]
    links = tuple(Link(source=a, target=b, bandwidth_gbps=100, delay_ms=5) for a, b in (("a", "b"), ("b", "a")))
    large = page("own", waited("j", 0, 0, chips=16))
    assert compare_waits(large, MONTH, own, links).compared == 1
    apart = compare_waits(large, MONTH, own)
    assert (apart.compared, apart.never_alone, apart.verdict) == (0, 1, "no comparison")


def test_more_jobs_than_are_simulated_are_refused() -> None:
    """The refusal names the owner, the month and the limit, before anything runs."""
    many = page("busy").model_copy(update={"jobs": (waited("j", 0, 0),) * (MAX_COMPARED_JOBS + 1)})
    with pytest.raises(InputError, match=r"owner 'busy' has 100,001 jobs in 2027-01"):
        compare_waits(many, MONTH, (BUSY,))


@pytest.mark.parametrize(
    ("mean_s", "p95_s", "verdict"),
    [(100, 1000, "equal"), (160, 1050, "equal"), (161, 1000, "worse"), (100, 1061, "worse"), (0, 940, "better"),
     (0, 1061, "worse")],
)  # fmt: skip
def test_worse_in_one_figure_is_worse(mean_s: float, p95_s: float, verdict: str) -> None:
    """A figure differs beyond 60 s and 5 percent; a better mean does not excuse a worse 95th percentile."""
    alone = WaitFigures(mean_s=100, median_s=0, p95_s=1000)
    assert wait_verdict(WaitFigures(mean_s=mean_s, median_s=0, p95_s=p95_s), alone) == verdict


@given(
    st.lists(
        st.tuples(st.integers(0, 20_000), st.integers(60, 9_000), st.integers(1, 16)), min_size=1, max_size=8
    )
)  # fmt: skip
@settings(max_examples=15)
def test_an_owner_alone_in_the_pool_waits_as_long_as_alone(asked: list[tuple[int, int, int]]) -> None:
    """A pool of one owner without other jobs is the same as no pool: equal waits, job by job."""
    own = cluster("own", nodes=2)
    jobs = sorted(
        (TraceJob(name=f"j{at}", owner="own", submit_s=float(submit_s), run_s=float(run_s), workers=chips)
         for at, (submit_s, run_s, chips) in enumerate(asked)),
        key=lambda one: (one.submit_s, one.name),
    )  # fmt: skip
    first_s = jobs[0].submit_s
    shifted = [TraceJob(name=one.name, owner="own", submit_s=one.submit_s - first_s, run_s=one.run_s,
                        workers=one.workers) for one in jobs]  # fmt: skip
    world = PoolSimulation(Pool(clusters=(own,)), shifted, delays=ALONE_DELAYS)
    world.run()
    measured = []
    for one, outcome in zip(jobs, world.job_outcomes.values(), strict=True):
        assert outcome.ended_s is not None
        waited_s = outcome.ended_s - outcome.job.submit_s - one.run_s
        measured.append(waited(one.name, one.submit_s, waited_s, one.run_s, chips=one.workers))
    found = compare_waits(page("own", *measured), MONTH, (own,))
    assert found.compared == len(jobs)
    assert (found.alone, found.verdict) == (found.pool, "equal")
