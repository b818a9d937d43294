"""Moves of running jobs inside a site, as the coordinator decides them: each test's first line is the rule."""

from __future__ import annotations

from isthmus.control.store.snapshot_codec import restore_state, serialize_state
from isthmus.core.messages.agent_messages import MoveProposal, ObservedPart, QueueEntry
from tests.control.driver import Driver
from tests.control.samples import plan

PROPOSAL = MoveProposal(job="wide", moved=(QueueEntry(job="m", attempt=1),), cost_card_s=20, loss_card_s=100)


def fragmented(**more: object) -> Driver:
    """At site `a` of 8 chips `m` and `k` run on two each; `wide` waits for four, of which the site offers two."""
    pool = Driver("a", chips=8)
    for name in "mk":
        pool.submit(name, plan("a", "a"), priority="high", **more)
        obey(pool, free=2)
        obey(pool, free=2)
        assert pool.state(name) == "running"
    pool.submit("wide")
    pool.answer("wide", plan(*"aaaa"))
    assert pool.state("wide") in ("waiting", "blocked")
    return pool


def obey(pool: Driver, *moves: MoveProposal, free: int = 2, protects: bool = True) -> None:
    """Let the site execute its orders, and offer `free` chips; without `protects` no checkpoint is verified yet."""
    told = [pool.done("a", order) for order in pool.coordinator.orders("a")]
    done: list[ObservedPart] = [one if protects else one.model_copy(update={"protection": None}) for one in told]
    pool.report("a", *done, free=free, moves=moves)


def kinds(pool: Driver, job: str) -> list[str]:
    return [one.kind for one in pool.coordinator.state.jobs[job].history.entries]


def test_the_whole_way_of_a_move() -> None:
    """Held, saved, stopped, and both jobs start: the waiting one on the freed chips, the moved one on the others."""
    pool = fragmented()
    obey(pool, PROPOSAL)
    assert pool.state("wide") == "preempting"
    assert pool.reason("wide") == "moving m to other devices to make room: waiting for its sites to be ready"
    obey(pool, PROPOSAL, free=2, protects=False)
    assert pool.orders("a")["wide", 1] == "ready"
    assert {order.job for order in pool.coordinator.orders("a") if order.protect} == {"m"}
    assert pool.state("m") == "running", "it is not stopped before its checkpoint is verified"
    obey(pool, PROPOSAL)
    assert (pool.state("wide"), pool.state("m")) == ("preparing", "stopping")
    obey(pool)
    obey(pool)
    obey(pool, free=0)
    assert (pool.state("wide"), pool.state("m"), pool.state("k")) == ("running", "running", "running")
    moved = pool.coordinator.state.jobs["m"]
    assert (moved.attempt, moved.restarts, moved.plan.id if moved.plan else "") == (2, 0, "p")
    assert "moved" in kinds(pool, "m")
    assert "preempted" not in kinds(pool, "m")
    told = next(one.text for one in moved.history.entries if one.kind == "moved")
    assert told.startswith("to other devices, so that job wide has a place, checkpoint at step ")
    assert pool.coordinator.state.moved == {}


def test_no_other_job_takes_the_chips_of_a_job_that_moves() -> None:
    """A small job that arrives meanwhile fits, but its chips are kept for the moved one."""
    pool = fragmented()
    obey(pool, PROPOSAL)
    pool.submit("small", plan("a", "a"))
    obey(pool, PROPOSAL, free=2, protects=False)
    assert pool.state("small") in ("waiting", "blocked")
    for _ in range(4):
        obey(pool)
    assert (pool.state("wide"), pool.state("m")) == ("running", "running")
    assert pool.state("small") in ("waiting", "blocked")


def test_only_the_head_of_the_queue_makes_others_move() -> None:
    """While another job waits ahead of it for chips of the same kind, a proposal is not taken."""
    pool = fragmented()
    pool.submit("first", priority="high")
    pool.answer("first", plan(*"aaaa"))
    obey(pool, PROPOSAL)
    assert pool.state("wide") in ("waiting", "blocked")
    pool.cancel("first")
    assert pool.state("wide") == "preempting"


def test_a_move_frees_more_than_it_costs() -> None:
    """A proposal that costs as much as the wait has cost is not taken, whatever the agent says."""
    pool = fragmented()
    obey(pool, PROPOSAL.model_copy(update={"loss_card_s": 20.0}))
    assert pool.state("wide") in ("waiting", "blocked")


def test_jobs_that_must_not_be_stopped_are_not_moved() -> None:
    """`preemptible: false` holds for moves as well."""
    pool = fragmented(preemptible=False)
    obey(pool, PROPOSAL)
    assert pool.state("wide") in ("waiting", "blocked")


def test_a_proposal_names_parts_of_its_own_site_as_they_are() -> None:
    """An old attempt, an unknown job and the waiting job itself are not moved."""
    pool = fragmented()
    for job, attempt in (("m", 2), ("nobody", 1), ("wide", 1)):
        strange = PROPOSAL.model_copy(update={"moved": (QueueEntry(job=job, attempt=attempt),)})
        obey(pool, strange)
        assert pool.state("wide") in ("waiting", "blocked")


def test_a_move_whose_checkpoint_never_comes_ends_without_a_loss() -> None:
    """After the time for checkpoints the waiting job waits again, with a back-off, and the other never stopped."""
    pool = fragmented()
    obey(pool, PROPOSAL)
    obey(pool, PROPOSAL, protects=False)
    pool.wait(pool.coordinator.state.config.checkpoint_timeout_s + 1)
    assert pool.state("m") == "running"
    obey(pool, PROPOSAL, protects=False)
    assert pool.state("wide") == "waiting"
    assert pool.coordinator.state.jobs["wide"].state_deadline_s is not None
    assert pool.coordinator.state.jobs["m"].attempt == 1


def test_a_server_that_restarts_in_the_middle_goes_on() -> None:
    """The state of a move is in the log, and in snapshots of it: whatever was saved continues from there."""
    for stop_after in range(6):
        pool = fragmented()
        obey(pool, PROPOSAL)
        for step in range(6):
            if step == stop_after:
                state = pool.coordinator.state
                again = type(pool.coordinator).replay(pool.log, state.config)
                assert (again.state.jobs, again.state.moved) == (state.jobs, state.moved)
                pool.coordinator = type(pool.coordinator).from_state(restore_state(serialize_state(state)))
            obey(pool, *((PROPOSAL,) if step < 2 else ()))
        assert (pool.state("wide"), pool.state("m")) == ("running", "running")
        assert pool.coordinator.state.jobs["m"].restarts == 0


def test_a_moved_job_waits_no_longer_ahead_of_others_than_its_time() -> None:
    """A site that then lacks the place keeps its chips for ten minutes; afterwards the job waits like any other."""
    pool = fragmented()
    obey(pool, PROPOSAL)
    for _ in range(3):
        obey(pool, free=0)
    obey(pool, free=0)
    assert pool.state("m") in ("waiting", "blocked")
    assert set(pool.coordinator.state.moved) == {"m"}
    pool.wait(601)
    obey(pool, free=0)
    pool.report("a", *(pool.done("a", order) for order in pool.coordinator.orders("a")), free=1)
    assert pool.coordinator.state.moved == {}
