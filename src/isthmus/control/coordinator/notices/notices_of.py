"""`notices_of`: what an event has to be told to those who subscribed, from the state after it.

Without a subscription it costs nothing. A job's notices follow from new entries of its history.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from isthmus.control.state.events import AgentLost, AgentReported, Event, NoticeDue, SiteGone, SubscriptionSet
from isthmus.control.state.job_history import HistoryEntry
from isthmus.control.state.job_records import JobRecord, PoolState, SubscriptionRecord
from isthmus.core.views.api_views import HistoryKind
from isthmus.core.views.notice_views import MAX_NOTICE_CHARS, NoticeTopic, PoolNotice

TOPIC_OF: Mapping[HistoryKind, NoticeTopic] = {
    "started": "state",
    "finished": "state",
    "failed": "state",
    "cancelled": "state",
    "preempted": "state",
    "moved": "state",
    "worker-lost": "faults",
    "stalled": "faults",
    "lost": "faults",
    "refused": "faults",
    "resumed": "faults",
}
"""The topic of each kind of history entry that makes a notice."""


def admit_subscription(state: PoolState, event: SubscriptionSet) -> bool:
    """Return whether the subscription differs from the present one."""
    known = state.subscriptions.get((event.role, event.name))
    return (known.subscription if known else None) != event.subscription


def set_subscription(state: PoolState, event: SubscriptionSet) -> None:
    """Replace or remove a subscription; what happened before it makes no notice."""
    if event.subscription is None:
        del state.subscriptions[event.role, event.name]
        return
    known = state.subscriptions.get((event.role, event.name))
    since_s = known.since_s if known is not None else event.now_s
    state.subscriptions[event.role, event.name] = SubscriptionRecord(event.subscription, since_s)


def notices_of(state: PoolState, event: Event) -> list[NoticeDue]:
    """Return the notices of an event that was handled, for each channel of each subscriber."""
    if not state.subscriptions:
        return []
    found = [due for job_id in sorted(state.changed_jobs) for due in _job_notices(state, job_id)]
    return [*found, *_site_notices(state, event), *_budget_notices(state, event)]


def _job_notices(state: PoolState, job_id: str) -> Iterator[NoticeDue]:
    job = state.jobs.get(job_id)
    if job is None:
        return
    for entry in job.history.take_unnoticed():
        topic = TOPIC_OF.get(entry.kind)
        if topic is None:
            continue
        notice = PoolNotice(
            kind=entry.kind, at_s=entry.time_s, job=job.id, site=entry.cluster or "", text=_text(job, entry)
        )
        yield from _addressed(state, {("user", job.user)}, topic, notice)


def _site_notices(state: PoolState, event: Event) -> Iterator[NoticeDue]:
    match event:
        case AgentLost(cluster=cluster):
            state.noticed_away.add(cluster)
            kind, text = "site-away", "its agent has stopped reporting"
        case SiteGone(cluster=cluster):
            state.noticed_away.discard(cluster)
            kind, text = "site-gone", f"it was declared gone by {event.by}"
        case AgentReported() if event.cluster.name in state.noticed_away:
            cluster = event.cluster.name
            state.noticed_away.discard(cluster)
            kind, text = "site-back", "its agent reports again"
        case _:
            return
    record = state.clusters.get(cluster)
    notice = PoolNotice(kind=kind, at_s=event.now_s, site=cluster, text=text)
    yield from _addressed(state, {("owner", record.cluster.owner if record else "")}, "sites", notice)


def _budget_notices(state: PoolState, event: Event) -> Iterator[NoticeDue]:
    """Tell the users whose jobs count to an account, or the job's own user, that a budget has passed 80 or 100 %."""
    for account, percent, text in state.accounts.notices:
        kind, _, name = account.partition(":")
        job = name if kind == "job" else ""
        notice = PoolNotice(kind=f"budget-{percent}", at_s=event.now_s, job=job, text=text[:MAX_NOTICE_CHARS])
        users = {state.jobs[job].user} if job else set(_users_of(state, account))
        yield from _addressed(state, {("user", user) for user in users}, "budgets", notice)


def _users_of(state: PoolState, account: str) -> Iterator[str]:
    tree = state.accounts.tree
    for role, user in state.subscriptions:
        if role == "user" and any(account in tree.accounts_of(user, one) for one in (*tree.projects_of(user), "")):
            yield user


def _addressed(
    state: PoolState, concerned: Set[tuple[str, str]], topic: NoticeTopic, notice: PoolNotice
) -> Iterator[NoticeDue]:
    """Yield a notice for the roles and names that it concerns, and for each admin."""
    for (to_role, to_name), record in state.subscriptions.items():
        is_concerned = to_role == "admin" or (to_role, to_name) in concerned
        if is_concerned and topic in record.subscription.topics and notice.at_s >= record.since_s:
            for channel in record.subscription.channels:
                yield NoticeDue(role=to_role, name=to_name, channel=channel, notice=notice)


def _text(job: JobRecord, entry: HistoryEntry) -> str:
    words = [entry.text or job.reason]
    words += [f"rank {entry.rank}"] if entry.rank is not None else []
    words += [f"step {entry.step}"] if entry.step is not None else []
    return "; ".join(word for word in words if word)[:MAX_NOTICE_CHARS]
