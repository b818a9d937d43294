"""Rules of the site's queue."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

from isthmus.agent.adapters.rules.rule_context import RuleContext, require_rule
from isthmus.agent.adapters.scheduler_adapter import QueueMove
from isthmus.core.messages.agent_messages import QueueEntry


def queue_is_ordered_by_moves(site: RuleContext) -> None:
    """Moves insert and reorder in sequence; every adapter of the site sees the result."""
    a, b, c, d = (QueueEntry(job=name, attempt=number) for number, name in enumerate("abcd"))
    queue = site.adapter()
    before = queue.observe().queue
    queue.order([QueueMove(entry=a), QueueMove(entry=b, after=a), QueueMove(entry=c)])
    require_rule(_queued(site, before) == [c, a, b], "a move puts its entry directly after another, or first")
    queue.order([QueueMove(entry=c, after=b), QueueMove(entry=d, after=QueueEntry(job="missing"))])
    require_rule(_queued(site, before) == [a, b, c, d], "a move after a missing entry puts its entry last")
    queue.order([QueueMove(entry=b)], removed=[a])
    require_rule(_queued(site, before) == [b, c, d], "entries without a move keep their order")
    queue.order([], removed=[a, b, c, d])
    require_rule(queue.observe().queue == before, "removed entries are not in the queue")


def long_queue_is_reordered_quickly(site: RuleContext) -> None:
    """A thousand moves take at most one second."""
    entries = [QueueEntry(job=f"j{number}", attempt=1) for number in range(1000)]
    queue = site.adapter()
    start_s = time.monotonic()
    queue.order([QueueMove(entry=entry) for entry in entries])
    took_s = time.monotonic() - start_s
    queue.order([], removed=entries)
    require_rule(took_s <= 1, f"a thousand moves take at most one second, not {took_s:.1f} s")


def _queued(site: RuleContext, before: Sequence[QueueEntry]) -> list[QueueEntry]:
    return [entry for entry in site.adapter().observe().queue if entry not in before]


def removing_what_is_not_there_is_allowed(site: RuleContext) -> None:
    """A removal that was executed before, or never had an object, changes nothing."""
    queue, entry = site.adapter(), QueueEntry(job="kit-gone", attempt=1)
    before = queue.observe().queue
    for _ in range(2):
        queue.order([], removed=[entry])
    require_rule(queue.observe().queue == before, "removing an unknown entry changes nothing")


def repeated_moves_are_one(site: RuleContext) -> None:
    """Moves whose reply was lost are sent again, and leave the same queue."""
    queue = site.adapter()
    before = queue.observe().queue
    entries = [QueueEntry(job=f"kit-{name}", attempt=1) for name in "abc"]
    moves = [QueueMove(entry=entries[0]), *(QueueMove(entry=b, after=a) for a, b in pairwise(entries))]
    for other in (queue, queue, site.adapter()):
        other.order(moves)
        require_rule(_queued(site, before) == entries, "repeated moves leave the same queue")
    queue.order([], removed=entries)


def an_entry_stands_once(site: RuleContext) -> None:
    """However often an entry is inserted, the queue has it once."""
    queue, entry = site.adapter(), QueueEntry(job="kit-once", attempt=3)
    before = queue.observe().queue
    for _ in range(3):
        queue.order([QueueMove(entry=entry)])
    require_rule(_queued(site, before) == [entry], "an entry stands in the queue once")
    queue.order([], removed=[entry])


def attempts_are_different_entries(site: RuleContext) -> None:
    """Two attempts of a job are two entries; removing one leaves the other."""
    queue = site.adapter()
    before = queue.observe().queue
    first, second = QueueEntry(job="kit-twice", attempt=1), QueueEntry(job="kit-twice", attempt=2)
    queue.order([QueueMove(entry=first), QueueMove(entry=second, after=first)])
    queue.order([], removed=[first])
    require_rule(_queued(site, before) == [second], "attempts are entries of their own")
    queue.order([], removed=[second])
