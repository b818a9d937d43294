"""`check_store`: conformance tests for implementations of `Store`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from isthmus.control.state.events import Event, JobCancelled, NoticeDue
from isthmus.control.store.log_base import LogBase, LogCompactedError
from isthmus.control.store.log_chain import LogEnd
from isthmus.control.store.store_interface import MAX_PAGE_BYTES, LogMovedError, Store, StoredToken
from isthmus.core.messages.agent_messages import LogChunk, StepMetrics
from isthmus.core.views.access_views import AuditFilter, AuditRecord
from isthmus.core.views.audit_chain import check_audit
from isthmus.core.views.notice_views import PoolNotice

Reopen = Callable[[Store], Store]


def check_store(store: Store, reopen: Reopen | None = None) -> Store:
    """Check an empty `store`; raise `AssertionError` with the first rule that it breaks.

    `reopen` closes and reopens a persistent store. Returns the store last opened; the caller closes it.
    """
    _check_events(store)
    _check_threads(store)
    _check_metrics(store)
    _check_logs(store)
    _check_tokens(store)
    secret = _check_secrets(store)
    _check_audit(store)
    _check_notices(store)
    if reopen is not None:
        before = (list(store.events()), store.metrics("a"), store.logs("a"), store.tokens())
        store = reopen(store)
        after = (list(store.events()), store.metrics("a"), store.logs("a"), store.tokens())
        _expect(before == after, "stored data is unchanged after a reopen")
        _expect(store.secret("one") == secret, "a secret is unchanged after a reopen")
        _expect(store.append([_event("z")]) == len(before[0]) + 1, "numbering continues after a reopen")
    _check_forget(store)
    _check_bases(store)
    return store


def _expect(holds: bool, rule: str) -> None:
    if not holds:
        raise AssertionError(f"the store breaks this rule: {rule}")


def _event(job_id: str) -> Event:
    return JobCancelled(now_s=1.5, job_id=job_id)


def _check_events(store: Store) -> None:
    _expect(list(store.events()) == [], "an empty store has no events")
    _expect(store.append([_event("a"), _event("b")]) == 2, "append returns the number of the last event")
    _expect(store.append([]) == 2, "appending nothing changes nothing")
    _expect(store.append([_event("c")]) == 3, "numbers rise by one")
    _expect(
        list(store.events()) == [(1, _event("a")), (2, _event("b")), (3, _event("c"))],
        "events are returned complete and in order",
    )
    _expect([number for number, _ in store.events(after=2)] == [3], "`after` is exclusive")
    _expect(store.append([_event("d")], expected_last=3) == 4, "an append that expects the log's end succeeds")
    for wrong in (3, 5):
        try:
            store.append([_event("e")], expected_last=wrong)
        except LogMovedError:
            continue
        _expect(False, "an append that expects another end of the log is rejected")
    _expect([number for number, _ in store.events(after=3)] == [4], "a rejected append stores nothing")
    with store.exclusive_access():
        _expect([number for number, _ in store.events(after=3)] == [4], "a turn sees the complete log")
        store.append([_event("f")], expected_last=4)
    _expect([number for number, _ in store.events(after=3)] == [4, 5], "events appended in a turn persist")


def _check_secrets(store: Store) -> bytes:
    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(store.secret, ["one"] * 8))
    _expect(len(made) == 1, "a secret is made once, whatever threads ask for it first")
    _expect(len(store.secret("one")) == 32, "a secret has 256 bits")
    _expect(store.secret("two") not in made, "secrets of different names differ")
    return store.secret("one")


def _check_threads(store: Store) -> None:
    first = store.append([]) + 1
    batches = [[_event(f"t{thread}-{turn}-{i}") for i in range(3)] for thread in range(4) for turn in range(5)]
    with ThreadPoolExecutor(4) as pool:
        ends = sorted(pool.map(store.append, batches))
    _expect(ends == list(range(first + 2, first + 60, 3)), "appends of several threads do not interleave")
    found = [event for _, event in store.events(after=first - 1)]
    in_order = [found[i : i + 3] for i in range(0, 60, 3)]
    _expect(sorted(map(str, in_order)) == sorted(map(str, batches)), "the events of one append are contiguous")


def _check_metrics(store: Store) -> None:
    def row(job: str, step: int, loss: float, attempt: int = 1) -> StepMetrics:
        return StepMetrics(job=job, attempt=attempt, rank=0, step=step, values={"loss": loss, "bytes": None})

    store.append_metrics([row("a", 0, 5.5), row("b", 0, 1.0), row("a", 1, 5.0)])
    store.append_metrics([row("a", 1, 9.9), row("a", 1, 4.5, attempt=2)])
    page = store.metrics("a")
    _expect(
        page.metrics == (row("a", 0, 5.5), row("a", 1, 5.0), row("a", 1, 4.5, attempt=2)),
        "metrics are returned in order, and the first of a (job, attempt, rank, step) is kept",
    )
    first = store.metrics("a", limit=1)
    _expect(len(first.metrics) == 1, "`limit` bounds a page")
    rest = store.metrics("a", after=first.next)
    _expect((*first.metrics, *rest.metrics) == page.metrics, "pages have no gap and no repetition")
    _expect(store.metrics("a", after=page.next).next == page.next, "an empty page keeps the cursor")
    newest = store.metrics("a", limit=1, newest=True)
    _expect(newest.metrics == page.metrics[-1:], "the newest metrics are the last ones of all pages")
    _expect(newest.next == page.next, "the cursor follows the newest metrics")
    _expect(store.metrics("a", limit=9, newest=True) == page, "the newest come in the order of arrival")


def _check_logs(store: Store) -> None:
    def chunk(offset: int, text: str, rank: int = 0) -> LogChunk:
        return LogChunk(job="a", attempt=1, rank=rank, offset=offset, text=text)

    store.append_logs([chunk(0, "añ"), chunk(0, "other", rank=1)])
    store.append_logs([chunk(0, "añ"), chunk(0, "añb"), chunk(3, "bc")])
    page = store.logs("a", rank=0)
    _expect("".join(one.text for one in page.chunks) == "añbc", "bytes sent twice are stored once")
    _expect([one.offset for one in page.chunks] == [0, 3, 4], "offsets count bytes of UTF-8")
    _expect(len(store.logs("a").chunks) == 4, "without a rank, the logs of all ranks are returned")
    first = store.logs("a", limit=2)
    rest = store.logs("a", after=first.next)
    _expect((*first.chunks, *rest.chunks) == store.logs("a").chunks, "pages have no gap and no repetition")
    _expect(store.output_size("a") == (3, 10), "the output of a job is counted in metrics and bytes of log")
    _expect(store.output_size("c") == (0, 0), "a job without output has none")
    large = LogChunk(job="large", attempt=1, rank=0, offset=0, text="x" * (MAX_PAGE_BYTES // 2))
    store.append_logs([large, large.model_copy(update={"rank": 1}), large.model_copy(update={"rank": 2})])
    page = store.logs("large")
    _expect(len(page.chunks) == 2, "a page is bounded in bytes")
    _expect(len(store.logs("large", after=page.next).chunks) == 1, "the next page has the rest")
    store.delete_job_output("large")


def _check_tokens(store: Store) -> None:
    one = StoredToken(role="user", name="ada", digest="d1", created_s=2.0)
    two = StoredToken(role="owner", name="hz", digest="d2", created_s=1.0)
    store.put_token(one)
    store.put_token(two)
    store.put_token(one)
    _expect(store.find_token("d1") == one, "a token is found by its digest")
    _expect(store.find_token("d3") is None, "an unknown digest finds nothing")
    _expect(store.tokens() == (two, one), "tokens are listed once each, oldest first")
    versions = [store.token_version()]
    for change in (
        {"expires_s": 9.0},
        {"expires_s": 10.0},
        {"expires_s": 10.0, "revoked_s": 5.0, "created_by": "root"},
    ):
        changed = two.model_copy(update=change)
        store.put_token(changed)
        _expect(store.find_token("d2") == changed, "a changed token replaces the one with its digest")
        versions.append(store.token_version())
    _expect(len(set(versions)) == len(versions), "every change of a token changes the version")
    key = StoredToken(role="owner", name="hz", digest="d4", created_s=3.0, site="east", replaces=two.id, high=True)
    store.put_token(key)
    _expect(store.find_token("d4") == key, "the key of a site keeps its cluster and what it replaces")
    for digest, expires_s in (("d5", 20.0), ("d6", 30.0)):
        store.put_token(
            StoredToken(role="user", name="ada", digest=digest, created_s=4.0, expires_s=expires_s, session_of="d1")
        )
    before = store.token_version()
    store.prune_sessions(25.0)
    _expect(store.find_token("d5") is None, "a session that has ended is deleted")
    found = store.find_token("d6")
    _expect(found is not None and found.session_of == "d1", "another session stays, with the token that signed in")
    _expect(store.find_token("d2") is not None, "no other token is deleted")
    _expect(store.token_version() != before, "a deletion changes the version")


def _check_audit(store: Store) -> None:
    records = [
        AuditRecord(at_s=10.0 * i, action="refused", actor=actor, subject=subject, address="10.0.0.1", detail="é")
        for i, (actor, subject) in enumerate([("ann", "job-1"), ("bob", "ann"), ("bob", "job-2"), ("", "")], start=1)
    ]
    store.append_audit(records[:3])
    store.append_audit(records[3:])
    found = store.audit(AuditFilter())
    _expect([one.number for one in found] == [1, 2, 3, 4], "audit records have rising numbers")
    bare = [one.model_copy(update={"number": 0, "hash": ""}) for one in found]
    _expect(bare == records, "audit records are stored whole")
    _expect(not check_audit(store.store_id, found).problems, "the lines of the audit log are chained")
    _expect(store.audit(AuditFilter(), limit=2) == found[2:], "without a cursor the newest audit records are returned")
    _expect(store.audit(AuditFilter(), limit=2, oldest=True) == found[:2], "the oldest audit records come on demand")
    _expect(store.audit(AuditFilter(), 1, 2) == found[1:3], "audit records follow the cursor in order")
    _expect(store.audit(AuditFilter(user="ann")) == found[:2], "a name finds acts by it and on it")
    _expect(store.audit(AuditFilter(since_s=30.0)) == found[2:], "a time finds audit records from it on")
    store.prune_audit(15.0, 99.0)
    kept = store.audit(AuditFilter())
    _expect(kept[:-1] == found[1:] and kept[-1].subject == "1", "old audit records are pruned, and the log says so")
    last = store.append([_event("acted")], audit=records[:1])
    store.put_token(StoredToken(role="user", name="ann", digest="f" * 64, created_s=9.0), records[1:2])
    kept = store.audit(AuditFilter())
    _expect([one.actor for one in kept[-2:]] == ["ann", "bob"], "records join the write that they are given with")
    _expect(not check_audit(store.store_id, kept).problems, "a pruned audit log is chained as well")
    try:
        store.append([_event("lost")], expected_last=last - 1, audit=records[:1])
    except LogMovedError:
        _expect(store.audit(AuditFilter()) == kept, "a refused append adds no audit record")


def _check_notices(store: Store) -> None:
    due = [
        NoticeDue(
            role="user", name=name, channel="webhook", notice=PoolNotice(kind="started", at_s=1.0, job="a", text="é")
        )
        for name in ("ann", "bob", "ann")
    ]
    _expect(store.notices() == (), "a new store has no notices")
    store.append([_event("told")], notices=due)
    found = store.notices()
    _expect([one.due for one in found] == due, "notices are stored with the events that they are given with, in order")
    numbers = [one.number for one in found]
    _expect(numbers == sorted(set(numbers)) and numbers[0] > 0, "notices have rising numbers")
    _expect(store.notices(numbers[0], 1) == found[1:2], "notices follow the cursor in order")
    store.batch_notices(numbers[0], [numbers[0], numbers[2]])
    _expect([one.batch for one in store.notices()] == [numbers[0], 0, numbers[0]], "a message keeps its number")
    store.delete_notices([numbers[0], numbers[2]])
    _expect(store.notices() == found[1:2], "delivered notices are deleted")


def _check_bases(store: Store) -> None:
    last = store.append([])
    _expect(store.bases.marks() == () and store.bases.active() is None, "a new store has no base")
    digest = store.digest_at(last - 1)
    _expect(digest is not None and len(digest) == 32, "every event has a hash")
    _expect(store.digest_at(last + 1) is None, "an event that is not there has no hash")
    before = list(store.events(last - 1))
    base = LogBase.of(b"state", LogEnd(last - 1, digest or b""), 5.0)
    store.bases.stage(LogBase.of(b"other", LogEnd(last - 2, digest or b""), 4.0))
    store.bases.stage(base)
    _expect(store.bases.staged() == base, "a staged base replaces another staged one")
    _expect(store.bases.drop_events() == 0, "a staged base replaces no event")
    _expect(len(list(store.events())) == last, "a staged base changes no replay")
    last = store.append([base.event(6.0)])
    store.bases.activate(base)
    store.bases.activate(base)
    _expect(store.bases.active() == base and store.bases.staged() is None, "an activated base is active")
    _expect([mark.end for mark in store.bases.marks()] == [base.end], "an active base has a mark")
    _expect([number for number, _ in store.events()] == [last - 1, last], "events begin behind the active base")
    _expect(store.bases.num_bytes(base.end.number, last) > 0, "events have a size")
    num_dropped = 0
    while count := store.bases.drop_events():
        num_dropped += count
    _expect(num_dropped == base.end.number, "exactly the events that the active base replaces are dropped")
    _expect(list(store.events(base.end.number))[:1] == before, "events behind the base are unchanged")
    try:
        list(store.events(1))
    except LogCompactedError:
        pass
    else:
        _expect(False, "a reader that lacks dropped events begins again")
    _expect(store.append([_event("y")], expected_last=last) == last + 1, "numbers continue behind a base")


def _check_forget(store: Store) -> None:
    store.delete_job_output("a")
    _expect(not store.metrics("a").metrics and not store.logs("a").chunks, "`forget` deletes all output of a job")
    _expect(len(store.metrics("b").metrics) == 1, "other jobs keep their metrics")
