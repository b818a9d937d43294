"""`index_violations`: the incremental indexes equal those computed from the records; `account_violations`: accounts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping

from isthmus.control.state.allocations import chip_needs_of
from isthmus.control.state.indexes import QueueKey
from isthmus.control.state.job_records import WAITING_STATES, JobRecord, PoolState
from isthmus.control.state.update_indexes import belongs_in_queue, is_checking, queue_key
from isthmus.core.pool_resource import PoolResource


def index_violations(state: PoolState) -> Iterator[str]:
    """Yield a message for each index that differs from its value computed from the records."""
    indexes, jobs = state.indexes, state.jobs.values()
    waiting = [job for job in jobs if job.number not in indexes.parked and not job.capped_by and belongs_in_queue(job)]
    wanted = {
        "ids_by_number": (dict(indexes.ids_by_number), {job.number: job.id for job in jobs}),
        "live_by_user": (indexes.live_by_user, dict(Counter(job.user for job in state.live_jobs.values()))),
        "stored_by_user": (indexes.stored_by_user, stored_by_user(state.jobs)),
        "order": (list(indexes.order), sorted(queue_key(job) for job in waiting)),
        "queued_by_user": (
            {user: list(keys) for user, keys in indexes.queued_by_user.items()},
            _queued_by(waiting, lambda job: job.user),
        ),
        "queued_by_share": (
            {account: list(keys) for account, keys in indexes.queued_by_share.items()},
            _queued_by(waiting, lambda job: job.share_account),
        ),
        "capped": (
            {account: list(keys) for account, keys in indexes.capped.items()},
            _queued_by([job for job in jobs if job.capped_by], lambda job: job.capped_by),
        ),
        "awaiting_choice": (
            set(indexes.awaiting_choice),
            {job.number for job in jobs if job.state == "waiting" and not job.auto_plan and job.plan is None},
        ),
        "elastic": (set(indexes.elastic), {job.id for job in jobs if job.state == "running" and job.absent_clusters()}),
        "preparing": (set(indexes.preparing), {job.id for job in jobs if job.state == "preparing"}),
        "preempting": (set(indexes.preempting), {job.id for job in jobs if job.state == "preempting"}),
        "checking": (set(indexes.checking), {job.id for job in jobs if is_checking(job)}),
        "preemptors": (set(indexes.preemptors), {job.id for job in jobs if job.victims}),
        "auto_planning": (
            indexes.auto_planning,
            {job.id for job in jobs if job.auto_plan and job.planner_input is not None},
        ),
        "deadlines": (
            {(name, number) for name, book in indexes.deadlines.items() for _, number in book},
            {(job.state, job.number) for job in jobs if job.state_deadline_s is not None},
        ),
        "expected_ends": (
            [n for _, n in indexes.expected_ends],
            [job.number for job in _expected_ends(state)],
        ),
        "numbers_by_user": (
            {user: list(numbers) for user, numbers in indexes.numbers_by_user.items()},
            _numbers_by_user(state),
        ),
    }
    for name, (found, right) in wanted.items():
        if found != right:
            yield f"index '{name}' is {found}, computed from the records it is {right}"
    waits = {job.number for job in jobs if job.state in WAITING_STATES or job.state == "planning"}
    if not (indexes.parked | set(indexes.interactive) | set(indexes.unplanned.entries)) <= waits:
        yield "a job that does not wait is parked, or waits to be planned"
    capped = {job.number for job in jobs if job.capped_by}
    if not capped <= waits:
        yield "a job that does not wait is kept out of the queue by a limit"
    if indexes.newly_queued or indexes.released_accounts or indexes.capacity_freed or indexes.capacity_added:
        yield "a change of queue or capacity was not processed"


def account_violations(state: PoolState) -> Iterator[str]:
    """Yield a message for each account that is counted wrongly or is above its limit on chips."""
    book, chips, jobs = state.accounts, Counter[str](), Counter[str]()
    placed: defaultdict[str, Counter[PoolResource]] = defaultdict(Counter)
    for job in state.live_jobs.values():
        for account in book.tree.accounts_of(job.user, job.project) if job.charged_chips else ():
            chips[account] += job.charged_chips
            jobs[account] += 1
            placed[account].update(chip_needs_of(job.plan_parts) if book.tree.has_places else {})
    for account in sorted(book.use.keys() | chips.keys()):
        use = book.use_of(account)
        if (use.num_chips, use.num_jobs) != (chips[account], jobs[account]):
            yield (
                f"{account} counts {use.num_chips} chips of {use.num_jobs} jobs, "
                f"but {jobs[account]} jobs hold {chips[account]}"
            )
        if use.chips_at != placed[account]:
            yield f"{account} counts {use.chips_at} by node group, but jobs hold {placed[account]}"
    for account, limits in book.tree.limited():
        for scope, limit in limits.on_chips.items():
            held = scope.chips_in(placed[account]) if scope.cluster else chips[account]
            if held > limit:
                yield f"{account} holds {held} chips{scope.of_text}, more than its limit of {limit}"
    claims = {(job.claims_in, job.id) for job in state.jobs.values() if job.claims_in}
    if claims != {(account, job_id) for account, found in book.claims.items() for job_id in found}:
        yield f"the claims {book.claims} are not those of the jobs: {sorted(claims)}"
    if book.num_counted != len(state.meter.ledger.transactions):
        yield f"{book.num_counted} transactions are counted as spent, the ledger has more"


def stored_by_user(jobs: Mapping[str, JobRecord]) -> dict[str, int]:
    """Return the bytes of the jobs of each user, with their models."""
    found: Counter[str] = Counter()
    for job in jobs.values():
        found[job.user] += job.packed.num_bytes
    return dict(found)


def _expected_ends(state: PoolState) -> list[JobRecord]:
    running = [job for job in state.jobs.values() if job.state == "running" and job.predicted_run_s]
    return sorted(running, key=lambda job: (job.started_s + job.predicted_run_s, job.number))


def _queued_by(jobs: list[JobRecord], name_of: Callable[[JobRecord], str]) -> dict[str, list[QueueKey]]:
    found: dict[str, list[QueueKey]] = {}
    for job in jobs:
        found.setdefault(name_of(job), []).append(queue_key(job))
    return {name: sorted(keys) for name, keys in found.items()}


def _numbers_by_user(state: PoolState) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for job in state.jobs.values():
        found.setdefault(job.user, []).append(job.number)
    return {user: sorted(numbers) for user, numbers in found.items()}
