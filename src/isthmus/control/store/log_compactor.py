"""`LogCompactor`: keeps the event log of a running server within its policy, one short step at a time.

    1. stage       the present state becomes a staged base; nothing depends on it
    2. archive     the events that it will replace are copied, if the operator wants them
    3. record      the leader appends `LogCompacted`: from now on the chain of hashes holds the base
    4. activate    replays begin with the base
    5. drop        the events that it replaces are deleted, some thousand at a time

A server that ends between any two steps is followed by one that repeats the step or goes on with the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

from isthmus.control.algorithms.compaction_policy import CompactionPolicy
from isthmus.control.state.events import LogCompacted
from isthmus.control.store.log_base import LogBase
from isthmus.control.store.log_chain import LogEnd
from isthmus.control.store.store_interface import Store

CHECK_INTERVAL_S = 60.0
"""Time between two looks at the log that found nothing to do."""
_log = logging.getLogger("isthmus.server")

Step = Literal["staged", "compacted", "dropped"]


class LogCompactor:
    """Compacts the log of `store` by `policy`.

    `durable_state` returns the number of the last event and the state after it (`serialize_state`), `record` appends an
    event and returns whether this server leads, `before_activation` is called with a base before it is recorded.
    """

    def __init__(
        self,
        store: Store,
        policy: CompactionPolicy,
        durable_state: Callable[[], tuple[int, bytes]],
        record: Callable[[LogCompacted], bool],
        before_activation: Callable[[LogBase], None] = lambda _: None,
    ) -> None:
        self._store, self._policy, self._durable_state, self._record = store, policy, durable_state, record
        self._before_activation = before_activation
        self._idle_until_s = float("-inf")

    def step(self, now_s: float, last_event: int) -> Step | None:
        """Do what is due, if this server leads; return what was done. `last_event` is the number of the last event."""
        if now_s < self._idle_until_s:
            return None
        bases = self._store.bases
        if bases.drop_events():
            return "dropped"
        marks = bases.marks()
        active = next((mark for mark in marks if mark.is_active), None)
        staged = next((mark for mark in marks if not mark.is_active), None)
        began_s = active.made_s if active is not None else self._first_event_s(now_s)
        replaced = active.end.number if active is not None else 0
        due = self._policy.next_step(
            age_s=now_s - began_s,
            num_bytes=bases.num_bytes(replaced, last_event),
            staged_age_s=None if staged is None else now_s - staged.made_s,
            staged_bytes=0.0 if staged is None else bases.num_bytes(staged.end.number, last_event),
        )
        if due == "stage":
            return self._stage(now_s)
        if due == "compact":
            return self._compact(now_s)
        self._idle_until_s = now_s + CHECK_INTERVAL_S
        return None

    def _first_event_s(self, now_s: float) -> float:
        return next((event.now_s for _, event in self._store.events()), now_s)

    def _stage(self, now_s: float) -> Step | None:
        number, state = self._durable_state()
        digest = self._store.digest_at(number)
        if digest is None:
            return None
        self._store.bases.stage(LogBase.of(state, LogEnd(number, digest), now_s))
        return "staged"

    def _compact(self, now_s: float) -> Step | None:
        base = self._store.bases.staged()
        if base is None:
            return None
        self._idle_until_s = now_s + CHECK_INTERVAL_S  # a failure is repeated then, not at once
        self._before_activation(base)
        if not self._record(base.event(now_s)):
            return None
        self._store.bases.activate(base)
        self._idle_until_s = float("-inf")
        _log.info("compacted the event log: a base replaces the events up to %d", base.end.number)
        return "compacted"
