"""Rules of a scheduler that fails, for adapters whose scheduler a test can break (`SchedulerFaults`)."""

from __future__ import annotations

from collections.abc import Callable

from isthmus.agent.adapters.rules.rule_context import LOOP_FOREVER, RuleContext, require_rule
from isthmus.core.errors import UnavailableError


def a_dead_scheduler_is_no_empty_one(site: RuleContext) -> None:
    """While the scheduler does not answer, a look fails; it does not report that there is nothing."""
    adapter = site.adapter()
    adapter.observe()
    with_fault(site, lambda: require_rule(_is_unavailable(adapter.observe), "a dead scheduler has no empty queue"))
    adapter.observe()


def a_worker_runs_on_without_its_scheduler(site: RuleContext) -> None:
    """A running worker is neither lost nor doubled by a restart of the scheduler."""
    adapter = site.adapter(LOOP_FOREVER)
    rank = site.start(adapter)
    site.wait_started()

    def while_down() -> None:
        require_rule(adapter.poll(site.folder).state == "running", "a worker runs on without its scheduler")
        require_rule(site.adapter().poll(site.folder).state == "running", "a new adapter thinks so too")

    with_fault(site, while_down)
    adapter.start(rank)
    require_rule(site.poll(adapter).state == "running", "a worker survives a restart of the scheduler")
    require_rule(site.num_starts == 1, "a restart of the scheduler starts nothing again")
    adapter.stop(site.folder, force=True)
    site.wait_exited(adapter)


def an_end_is_seen_without_the_scheduler(site: RuleContext) -> None:
    """The exit status of a worker that ends while the scheduler is down is kept."""
    adapter = site.adapter('while [ ! -e "$1/go" ]; do sleep 0.02; done; exit 7')
    site.start(adapter)
    site.wait_started()
    with_fault(site, (site.folder / "go").touch)
    require_rule(site.wait_exited(adapter).exit_status == 7, "an exit status outlives the scheduler")


def a_hold_survives_or_ends_whole(site: RuleContext) -> None:
    """A hold that the scheduler forgot when it was killed is asked for again under its id: never two, never half."""
    adapter, request = site.adapter(), site.request(2)
    site.granted(adapter, request)
    with_fault(site, lambda: None)
    site.wait("a hold is granted again after a restart", lambda: _held(site, request.id) in (2, 0))
    state = adapter.hold(request).state
    require_rule(state in ("granted", "waiting", "ended"), "a hold has a state after a restart")
    require_rule(_held(site, request.id) in (0, 2), "a hold is whole after a restart")


def a_hold_whose_reply_is_lost_is_one(site: RuleContext) -> None:
    """A hold asked for while the scheduler dies fails or holds; asked for again it is one."""
    adapter, request = site.adapter(), site.request()
    with_fault(site, lambda: require_rule(_is_unavailable(lambda: adapter.hold(request)), "no hold without scheduler"))
    site.granted(adapter, request)
    require_rule(_held(site, request.id) == 1, "a hold whose reply was lost is one")


def a_release_is_not_forgotten(site: RuleContext) -> None:
    """A release that failed is repeated after the restart and ends the hold for good."""
    adapter, request = site.adapter(), site.request()
    site.granted(adapter, request)
    with_fault(site, lambda: _is_unavailable(lambda: adapter.release(request.id)))
    adapter.release(request.id)
    site.wait("a release after a restart ends the hold", lambda: _held(site, request.id) == 0)
    require_rule(adapter.hold(request).state == "ended", "a released id stays used up after a restart")


def a_restart_changes_the_epoch(site: RuleContext) -> None:
    """Looks show within a few that another run of the scheduler answers, and a new adapter at once, if it may forget.

    A scheduler that forgets nothing keeps its epoch and its holds.
    """
    adapter, request = site.adapter(), site.request()
    granted = site.granted(adapter, request)
    before = adapter.observe().epoch
    with_fault(site, lambda: None)
    if not adapter.capabilities.forgets:
        after = adapter.observe()
        require_rule((after.epoch, granted in after.holds) == (before, True), "a restart forgets nothing")
        return
    require_rule(site.adapter().observe().epoch != before, "a restart changes the epoch")
    site.wait("a restart changes the epoch", lambda: adapter.observe().epoch != before)


def a_start_without_scheduler_is_repeated(site: RuleContext) -> None:
    """A start that fails for want of the scheduler can be repeated: the program runs once, unless its hold was lost."""
    adapter = site.adapter("exit 5")
    rank = site.rank(adapter)
    with_fault(site, lambda: _is_unavailable(lambda: adapter.start(rank)))

    def ended() -> bool:
        if site.poll(adapter).state == "exited":
            return True
        if not _held(site, rank.hold):
            adapter.stop(site.folder, force=True)
        else:
            _is_unavailable(lambda: adapter.start(rank))
        return False

    site.wait("a repeated start runs the program, or its hold has ended", ended)
    found = adapter.poll(site.folder).exit_status, site.num_starts
    require_rule(found == (5, 1) or not _held(site, rank.hold), "a repeated start runs the program once")
    require_rule(site.num_starts <= 1, "a repeated start runs the program once")


def with_fault(site: RuleContext, act: Callable[[], object]) -> None:
    """Kill the scheduler, `act`, and start it again."""
    site.faults.kill()
    try:
        act()
    finally:
        site.faults.restart()


def _is_unavailable(call: Callable[[], object]) -> bool:
    try:
        call()
    except UnavailableError:
        return True
    return False


def _held(site: RuleContext, hold_id: str) -> int:
    """Return how many ranks have cards in a hold, by a new adapter's look."""
    return sum(len(hold.cards) for hold in site.adapter().observe().holds if hold.id == hold_id)
