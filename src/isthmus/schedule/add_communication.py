"""`add_communication`: adds communication that overlaps computation to a schedule of compute operations.

Rules, for every stage:
- before a computation, it posts the receives of that input and of the next `receive_ahead` inputs from every
  peer, so a stage holds at most `1 + receive_ahead` receive buffers per peer;
- it sends an output immediately after the computation; computation never waits for a send;
- the wait that frees a send buffer follows a message from the same peer that implies delivery (the peer
  computed that message after using the sent tensor): it bounds the buffers and never blocks. Sends without
  such a message are waited for before the update, or as soon as more than `max_pending_sends` are pending.

Source: cross-domain pooling report, section 4.2.1, which starts the sends later (`docs/design/simulator.md`).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from isthmus.core.errors import PlanError
from isthmus.schedule.operation import WAIT_OF, Operation, OperationKind, Schedule

_RECEIVE_OF: dict[OperationKind, OperationKind] = {
    "forward": "receive_forward",
    "backward": "receive_backward",
    "backward_input": "receive_backward",
}
_SEND_OF: dict[OperationKind, OperationKind] = {
    "forward": "send_forward",
    "backward": "send_backward",
    "backward_input": "send_backward",
}


def require_counts(num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> None:
    """Raise `PlanError` for a count below 1."""
    counts = (("stages", num_stages), ("micro-batches", num_micro_batches), ("chunks", num_chunks))
    for what, count in counts:
        if count < 1:
            raise PlanError(f"schedule with {count} {what}", hint="all counts must be at least 1")


def add_communication(
    compute_schedule: Schedule, receive_ahead: int = 1, max_pending_sends: float = math.inf
) -> Schedule:
    """Return `compute_schedule`, a schedule of compute operations only, with communication and update added.

    `receive_ahead` is the number of receives posted beyond the next one, per peer (at least 0). `max_pending_sends`
    limits the pending sends of a stage that no received message confirms.
    """
    if receive_ahead < 0:
        raise PlanError(f"receive_ahead is {receive_ahead}", hint="it must be at least 0")
    flow = _DataFlow(compute_schedule)
    stages = range(compute_schedule.num_stages)
    laid = tuple(tuple(_add_to_stage(flow, stage, receive_ahead, max_pending_sends)) for stage in stages)
    return replace(compute_schedule, stages=laid)


class _DataFlow:
    """The data flow of a schedule: the producer and the consumer of each compute operation's tensors."""

    def __init__(self, schedule: Schedule) -> None:
        self.orders, self.trains = schedule.stages, schedule.trains
        self.position = [{one: i for i, one in enumerate(order)} for order in schedule.stages]
        self.producer: list[dict[Operation, int]] = [{} for _ in schedule.stages]
        self.consumer: list[dict[Operation, tuple[int, Operation]]] = [{} for _ in schedule.stages]
        self.messages: dict[tuple[int, int], list[Operation]] = defaultdict(list)
        """By (sender, receiver): the receiver's operations that use the messages, in send order."""
        self.send_positions: dict[tuple[int, int], list[int]] = defaultdict(list)
        """By (sender, receiver): the position in the sender's operations that computes each message."""
        for stage, one in schedule:
            if one.kind in _SEND_OF and (step := self._consumer_of(schedule, stage, one)) is not None:
                peer, fed = step
                self.consumer[stage][one] = step
                self.producer[peer][fed] = stage
                self.messages[stage, peer].append(fed)
                self.send_positions[stage, peer].append(self.position[stage][one])

    def _consumer_of(self, schedule: Schedule, stage: int, one: Operation) -> tuple[int, Operation] | None:
        virtual = schedule.virtual_stage(stage, one) + (1 if one.kind == "forward" else -1)
        if not 0 <= virtual < schedule.num_virtual_stages:
            return None
        peer, chunk = schedule.route(one.micro_batch)[virtual]
        if one.kind == "forward":
            return peer, Operation("forward", one.micro_batch, chunk)
        unsplit = Operation("backward", one.micro_batch, chunk)
        split = Operation("backward_input", one.micro_batch, chunk)
        return peer, unsplit if unsplit in self.position[peer] else split

    def delivery_proof(self, stage: int, one: Operation) -> Operation | None:
        """Return the operation of `stage` whose input implies that the peer has used the output of `one`."""
        peer, fed = self.consumer[stage][one]
        used_at = self.position[peer][fed]
        first, own_at = bisect_left(self.send_positions[peer, stage], used_at), self.position[stage][one]
        later = itertools.islice(self.messages[peer, stage], first, None)
        return next((proven for proven in later if self.position[stage][proven] > own_at), None)


def _communication(kinds: dict[OperationKind, OperationKind], one: Operation) -> Operation:
    return Operation(kinds[one.kind], one.micro_batch, one.chunk)


def _wait_for(one: Operation) -> Operation:
    return Operation(WAIT_OF[one.kind], one.micro_batch, one.chunk)


def _add_to_stage(flow: _DataFlow, stage: int, receive_ahead: int, max_pending_sends: float) -> Iterator[Operation]:
    peers = sorted({peer for peer, receiver in flow.messages if receiver == stage})
    queues: dict[int, Sequence[Operation]] = {peer: flow.messages[peer, stage] for peer in peers}
    number = {one: i for queue in queues.values() for i, one in enumerate(queue)}
    posted, needed = dict.fromkeys(peers, 0), dict.fromkeys(peers, 0)
    proven: dict[Operation, list[Operation]] = defaultdict(list)
    unproven: deque[Operation] = deque()
    for one in flow.orders[stage]:
        # Step 1: post the receives up to this input and `receive_ahead` beyond.
        source = flow.producer[stage].get(one)
        if source is not None:
            needed[source] = max(needed[source], number[one] + 1)
        for peer in peers:
            end = min(needed[peer] + receive_ahead, len(queues[peer]))
            yield from (_communication(_RECEIVE_OF, fed) for fed in queues[peer][posted[peer] : end])
            posted[peer] = max(posted[peer], end)
        # Step 2: wait for the input, and free the send buffers whose delivery it implies.
        if source is not None:
            yield _wait_for(_communication(_RECEIVE_OF, one))
            yield from proven.pop(one, ())
        # Step 3: compute and send.
        yield one
        if one in flow.consumer[stage]:
            send = _communication(_SEND_OF, one)
            yield send
            proof = flow.delivery_proof(stage, one)
            (unproven if proof is None else proven[proof]).append(_wait_for(send))
            if len(unproven) > max_pending_sends:
                yield unproven.popleft()
    yield from unproven
    if flow.trains:
        yield Operation("update", 0)
