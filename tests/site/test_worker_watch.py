"""How ends of workers are told, and the lease on which they run."""

from __future__ import annotations

import math

import pytest

from isthmus.core.messages.agent_messages import AgentOrders, PartOrder
from isthmus.core.messages.worker_folder import RUN_LEASE_ENDED
from isthmus.site.exit_status import was_stopped
from isthmus.site.machine_events import LogWarning, OrdersReceived, RenewRunLease
from tests.site.driver import Site, local
from tests.site.samples import address, order


@pytest.fixture
def site() -> Site:
    """A site at which a/1 runs on two devices."""
    site = Site()
    site.obey(order("prepared", places=["east/h20"] * 2))
    site.obey(order("running", places=["east/h20"] * 2))
    return site


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (RUN_LEASE_ENDED, "rank 0 ended itself: its site had no contact with the server until its lease ended"),
        (None, "rank 0 ended with status None"),
        (128, "rank 0 ended with status 128"),
        (129, "rank 0 was ended by signal 1"),
    ],
)
def test_an_end_is_told_in_words(site: Site, status: int | None, words: str) -> None:
    """A status above 128 is that of a signal, as in a shell; without a log there is no colon."""
    site.see("exited", exit_status=status)
    assert site.detail() == words


@pytest.mark.parametrize(("status", "stopped"), [(143, True), (137, True), (0, False), (None, False), (15, False)])
def test_sigterm_and_sigkill_stop_a_worker(status: int | None, stopped: bool) -> None:
    """Any other end is its own."""
    assert was_stopped(status) is stopped


def test_a_worker_that_was_stopped_with_its_part_has_not_failed(site: Site) -> None:
    """The part's own reason stays."""
    site.obey(order("released"))
    site.see("exited", 0, exit_status=143)
    site.see("exited", 1, exit_status=137)
    assert (site.states, site.detail(), site.part().fault) == ({"a/1": "released"}, "", None)


def test_a_later_failure_that_explains_no_more_is_not_told(site: Site) -> None:
    """The first of two equal causes stays."""
    site.see("exited", 0, exit_status=1, log_tail="first")
    site.see("exited", 1, exit_status=1, log_tail="second")
    assert site.detail() == "rank 0 ended with status 1: first"


def test_what_is_seen_of_an_unknown_or_ended_worker_changes_nothing(site: Site) -> None:
    """A late look at a process that has ended, of another part, or of a rank elsewhere."""
    site.see("exited", 0, exit_status=0)
    before = site.machine.observed_parts()
    for rank, job in ((0, "a"), (7, "a"), (0, "b")):
        assert site.see("running", rank, job, address=address(), unsaved_s=100) == []
    assert site.machine.observed_parts() == before
    assert site.part().workers[0].address is None


def test_an_address_that_is_reported_once_stays() -> None:
    """A look that finds none, since the file is being written, takes none away; another one replaces it."""
    site = Site()
    site.obey(order("prepared"))
    site.obey(order("running"))
    site.see("running", address=address(0))
    site.see("running")
    assert site.machine.observed_parts()[0].workers == (address(0),)
    moved = address(0).model_copy(update={"port": 1})
    site.see("running", address=moved)
    assert site.machine.observed_parts()[0].workers == (moved,)


def answer(*parts: PartOrder, lease_s: float = 60, fence: int = 0) -> AgentOrders:
    """Return orders with a run lease."""
    return AgentOrders(parts=parts, run_lease_s=lease_s, fence=fence)


def test_a_server_without_a_lease_lets_workers_run_without_end(site: Site) -> None:
    """Also where one had been set before: the workers get the new end."""
    machine = site.machine
    machine.handle(OrdersReceived(now_s=0, orders=answer()))
    done = machine.handle(OrdersReceived(now_s=1, orders=answer(lease_s=0)))
    assert RenewRunLease(lease_s=0, until_s=math.inf) in done
    assert machine.run_lease_s() == 0


def test_an_answer_under_an_older_fence_renews_no_lease(site: Site) -> None:
    """A server that was replaced must not keep its workers alive."""
    machine = site.machine
    runs = order("running", places=["east/h20"] * 2)
    machine.handle(OrdersReceived(now_s=0, orders=answer(runs, fence=2)))
    done = machine.handle(OrdersReceived(now_s=50, orders=answer(runs, fence=1)))
    assert [type(step) for step in done] == [LogWarning]
    assert machine.site.run_lease_until_s == 60


def test_an_answer_that_took_as_long_as_its_lease_is_dropped_with_its_delay(site: Site) -> None:
    """One moment earlier it counts."""
    machine = site.machine
    late = OrdersReceived(now_s=70, orders=answer(), sent_s=10)
    assert machine.handle(late) == [LogWarning(text="dropped orders that arrived 60 s late")]
    assert site.states == {"a/1": "running"}
    in_time = OrdersReceived(now_s=69, orders=answer(), sent_s=10)
    assert RenewRunLease(lease_s=60, until_s=70) in machine.handle(in_time)


def test_the_lease_is_reported_if_every_worker_of_the_pool_here_has_it() -> None:
    """Local jobs, and parts that have ended, have none to end with."""
    site = Site()
    site.local(local("x", 1))
    old = order("prepared", "old", places=["east/l40s"])
    site.obey(old)
    site.obey(order("running", "old", places=["east/l40s"]))
    machine = site.machine
    machine.handle(OrdersReceived(now_s=0, orders=answer(order("running", "old", places=["east/l40s"]))))
    assert machine.run_lease_s() == 0
    site.see("exited", job="old", exit_status=0)
    assert machine.run_lease_s() == 60


def test_a_worker_speaks_for_a_device_of_its_own_only(site: Site) -> None:
    """Another device than those that the site gave to it is replaced by its first one."""
    given = site.part().workers[0].devices[0]
    site.see("running", 0, address=address(0).model_copy(update={"device": "h20/0/99"}))
    seen = site.part().workers[0].address
    assert seen is not None
    assert seen.device == given
    site.see("running", 1, address=address(1))
    assert site.part().workers[1].address == address(1)
