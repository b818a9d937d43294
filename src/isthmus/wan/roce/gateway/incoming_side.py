"""`IncomingSide`: frames from the far gateway towards this site's NICs: put in order, handed over, answered for."""

from __future__ import annotations

import math
from collections.abc import Callable

from isthmus.core.errors import ProtocolError
from isthmus.wan.roce.gateway.connections import Connections
from isthmus.wan.roce.gateway.gateway_datagram import (
    NO_QUEUE_PAIR,
    DataBody,
    DatagramKind,
    FailureEntry,
    FlowFailure,
    build_list,
    full_number,
    pack_failure,
    pack_feedback,
)
from isthmus.wan.roce.gateway.gateway_events import GatewayInstruction, QueuePairFailed, SendOnLink, SendToNic
from isthmus.wan.roce.gateway.gateway_settings import GatewaySettings
from isthmus.wan.roce.gateway.held_bytes import HeldBytes
from isthmus.wan.roce.gateway.incoming_flow import IncomingFlow
from isthmus.wan.roce.gateway.link_state import LinkState
from isthmus.wan.roce.gateway.queue_pairs import QueuePairs
from isthmus.wan.roce.near_replies import NAK_SEQUENCE, RNR_FIRST, RNR_LAST
from isthmus.wan.roce.request_order import READS_AND_ATOMICS, REQUESTS, STARTS, Place
from isthmus.wan.roce.rnr_timers import RNR_TIMERS_S
from isthmus.wan.roce.roce_opcodes import PSN_SPAN, RESPONSES, Opcode
from isthmus.wan.roce.roce_view import FlowKey, RoceView, swap_ends, view_frame
from isthmus.wan.roce.timer_heap import TimerHeap

BURST_S = 50e-6
"""Time whose bytes may go to a NIC at once."""

_MAX_CLOSED = 65_536
_LOOK_FOR_IDLE = 64
_PARTIAL_RESPONSES = frozenset({Opcode.READ_RESPONSE_FIRST, Opcode.READ_RESPONSE_MIDDLE})

OnAnswer = Callable[[FlowKey, RoceView, list[GatewayInstruction]], bool]
"""Takes the key of the requests and a far NIC's answer; returns whether the answer still has to be handed over."""


class IncomingSide:
    """All incoming flows; every method appends what is to be done to `out`."""

    def __init__(
        self,
        settings: GatewaySettings,
        link: LinkState,
        pairs: QueuePairs,
        connections: Connections,
        *,
        on_answer: OnAnswer,
        on_message: Callable[[RoceView], None],
    ) -> None:
        """`on_message` gets datagrams that may set up a queue pair, on their way to the NIC."""
        self.settings, self._link, self._pairs, self._connections = settings, link, pairs, connections
        self._on_answer, self._on_message = on_answer, on_message
        self.held = HeldBytes(settings.max_total_bytes)
        self.num_refused = self.num_handed = self.num_repeated = self.num_handed_again = 0
        self.failed: list[IncomingFlow] = []
        """Flows that failed since this list was last emptied."""
        self._flows: dict[FlowKey, IncomingFlow] = {}
        self._by_id: dict[int, IncomingFlow] = {}
        self._closed: dict[int, None] = {}
        self._unpaired: dict[tuple[bytes, int], IncomingFlow] = {}
        self._timers = TimerHeap[IncomingFlow]()
        self._dirty: dict[IncomingFlow, None] = {}
        self._touched: dict[IncomingFlow, None] = {}
        self._told: dict[int, FlowFailure] = {}
        self._feedback_s, self._feedback_interval_s = math.inf, settings.feedback_interval_s

    def __len__(self) -> int:
        return len(self._flows)

    def next_s(self) -> float:
        """Return when something is due."""
        return min(self._timers.next_s, self._feedback_s)

    def flow(self, key: FlowKey) -> IncomingFlow | None:
        """Return the flow of a key."""
        return self._flows.get(key)

    # From the link

    def take(self, body: DataBody, now_s: float, out: list[GatewayInstruction]) -> None:
        """Take a frame from the far gateway; `finish` hands over what is in order then."""
        try:
            view = view_frame(body.frame)
        except ProtocolError:
            self.num_refused += 1
            return
        flow = self._by_id.get(body.flow) or self._open(body.flow, view, now_s)
        if flow is None or flow.key != view.key:
            self.num_refused += 1
            return
        if flow.failed is not None:
            self._told[flow.flow] = flow.failed
            self._ask_feedback(now_s)
            return
        number = full_number(body.low_number, flow.floor)
        if number < 0 or flow.has(number):
            self.num_repeated += 1
        elif not flow.has_room(number, len(view.frame)):
            self.num_refused += 1
        else:
            flow.used_s = now_s
            flow.was_acknowledged_near |= self._link.peer_acknowledges
            flow.is_shared |= body.is_shared
            for ready in flow.add(number, view, now_s):
                self._put_in_order(flow, ready, now_s, out)
        self._touched[flow] = None

    def _put_in_order(self, flow: IncomingFlow, view: RoceView, now_s: float, out: list[GatewayInstruction]) -> None:
        if flow.failed is not None:
            return
        if view.opcode not in REQUESTS:
            flow.queue(view, -1)
            if view.opcode == Opcode.DATAGRAM_SEND_ONLY:
                self._on_message(view)
        else:
            place = Place.NEXT if flow.order.is_next(view.psn) else flow.order.place(view.psn)
            if place in (Place.AHEAD, Place.ELSEWHERE) and flow.is_suspect and view.opcode not in STARTS:
                place = Place.AHEAD
            if place is Place.AHEAD and flow.is_suspect:
                self.fail(flow, FlowFailure.GAP, now_s, out)
                return
            flow.suspect_s = math.inf
            if place is Place.BEHIND:
                if not (flow.is_pending(view.psn) and flow.queue_pair != NO_QUEUE_PAIR):
                    flow.queue(view, -1)  # the NIC answers it once more
                else:
                    flow.drop(view)
            else:
                if place is not Place.NEXT:
                    flow.order.rewind(view.psn)
                wants_answer = view.wants_ack or view.opcode in READS_AND_ATOMICS
                flow.queue(view, flow.order.take(view), wants_answer=wants_answer)
        flow.advance()

    def _open(self, number: int, view: RoceView, now_s: float) -> IncomingFlow | None:
        if number in self._closed:
            return None
        flow = self._flows.get(view.key)
        if flow is not None and flow.is_orphan:
            flow.is_orphan = False
            flow.flow = number
            self._by_id[number] = flow
            return flow
        if flow is not None:
            if (number - flow.flow) % 2**32 >= 2**31:
                return None
            self._close(flow)
        if len(self._flows) >= self.settings.max_queue_pairs and not self._evict_idle(now_s):
            return None
        flow = IncomingFlow(number, view, self.settings, self.held)
        self._flows[flow.key] = self._by_id[number] = flow
        self._pairs.enter(flow.key, flow.source_port)
        if (new := self._connections.take(flow.key)) is not None:
            self._pairs.join(new.back, flow.key)
            flow.order.begin(new.first_psn, new.mtu_bytes)
        if (outgoing := self._pairs.outgoing_of(flow.key)) is not None:
            flow.queue_pair = outgoing[1]
        else:
            self._unpaired[flow.key[0], flow.source_port] = flow
        return flow

    def begin_anew(self, key: FlowKey) -> None:
        """End the flow of a queue pair that is set up again."""
        if (flow := self._flows.get(key)) is not None:
            self._close(flow)

    def _evict_idle(self, now_s: float) -> bool:
        for _, flow in zip(range(_LOOK_FOR_IDLE), list(self._flows.values()), strict=False):
            if flow.is_done and now_s - flow.used_s >= self.settings.idle_s / 4:
                self._close(flow)
                return True
        return False

    def forget(self, number: int) -> None:
        """Forget a flow that its sender has ended."""
        if (flow := self._by_id.get(number)) is not None and flow.is_done:
            self._close(flow)

    def failed_there(self, number: int, reason: FlowFailure, now_s: float, out: list[GatewayInstruction]) -> None:
        """Give up a flow that its sender has given up."""
        if (flow := self._by_id.get(number)) is not None:
            self.fail(flow, reason, now_s, out, tells=False)

    def probe(self, number: int, now_s: float) -> None:
        """Give feedback on a flow; one that is unknown here has failed."""
        if (flow := self._by_id.get(number)) is None:
            self._told[number] = FlowFailure.GAP
            self._ask_feedback(now_s)
        elif flow.failed is not None:
            self._told[number] = flow.failed
            self._ask_feedback(now_s)
        else:
            self._mark_dirty(flow, now_s)

    def lose_peer(self, now_s: float) -> None:
        """The far gateway has lost its table: its flows go on under other numbers.

        Of what it acknowledged, frames may be lost; the next request proves it, or the queue pair fails.
        """
        self._by_id.clear()
        self._closed.clear()
        self._dirty.clear()
        self._told.clear()
        for flow in self._flows.values():
            flow.is_orphan = True
            flow.begin_again()
            if flow.was_acknowledged_near and flow.order.has_begun and flow.failed is None:
                flow.suspect_s = now_s + self.settings.suspect_s
            self._timers.set(flow, min(flow.suspect_s, now_s + self.settings.idle_s))

    # To the NIC

    def _hand_over(self, flow: IncomingFlow, now_s: float, out: list[GatewayInstruction]) -> None:
        rate = flow.rate
        while flow.has_frames and now_s >= flow.due_s:
            view = flow.next_frame(now_s)
            if view is None:
                continue
            if view.opcode in RESPONSES:
                key = self._pairs.outgoing_of(flow.key)
                if key is not None and not self._on_answer(key, view, out):
                    continue
            self.num_handed += 1
            out.append(SendToNic(view.frame))
            size = len(view.frame)
            rate.sent(size)
            flow.due_s = max(flow.due_s, now_s - BURST_S) + size / rate.bytes_per_s(now_s)

    def answer(self, view: RoceView, now_s: float, out: list[GatewayInstruction]) -> bool:
        """Take an answer of this site's NIC to requests handed to it; return whether it ends here.

        `finish` does what follows for the requests.
        """
        key = self._pairs.incoming_of(view.key)
        flow = self._flows.get(key) if key is not None else self._learn(view, now_s)
        if flow is None:
            return False
        if flow.queue_pair == NO_QUEUE_PAIR:  # the other direction has shown it
            self._pair(flow, view.queue_pair)
        self._touched[flow] = None
        return self._take_answer(flow, view, now_s, out)

    def finish(self, now_s: float, out: list[GatewayInstruction]) -> None:
        """Do what follows from a run of frames, once for each flow: hand over what is in order, note news of it."""
        for flow in self._touched:
            if self._flows.get(flow.key) is flow:
                self._hand_over(flow, now_s, out)
                self._set_timer(flow, now_s)
                self._mark_dirty(flow, now_s)
        self._touched.clear()

    def _take_answer(self, flow: IncomingFlow, view: RoceView, now_s: float, out: list[GatewayInstruction]) -> bool:
        psn, previous = view.psn, (view.psn - 1) % PSN_SPAN
        if view.opcode != Opcode.ACKNOWLEDGE:
            flow.answered(previous if view.opcode in _PARTIAL_RESPONSES else psn, now_s)
            flow.has_acknowledged = True
            return False
        syndrome = view.syndrome
        if syndrome < RNR_FIRST:
            flow.answered(psn, now_s)
            flow.has_acknowledged = True
            return False
        if flow.is_answered(psn):
            return syndrome <= NAK_SEQUENCE  # late
        flow.answered(previous, now_s)
        if RNR_FIRST <= syndrome <= RNR_LAST and flow.is_pending(psn):
            flow.send_again(now_s, RNR_TIMERS_S[syndrome & 31])
            return True
        if syndrome != NAK_SEQUENCE:
            return False
        if flow.is_pending(psn):
            self._hand_again(flow, now_s, out)
            return True
        if flow.is_expected_at(psn):
            return True  # late: the request it names was not sent yet, or waits for its turn
        if flow.was_acknowledged_near and flow.has_acknowledged:
            self.fail(flow, FlowFailure.GAP, now_s, out)
            return True
        return False

    def _hand_again(self, flow: IncomingFlow, now_s: float, out: list[GatewayInstruction]) -> None:
        flow.num_nic_tries += 1
        self.num_handed_again += 1
        if flow.num_nic_tries > self.settings.max_tries:
            self.fail(flow, FlowFailure.NIC, now_s, out)
        else:
            flow.send_again(now_s)

    def slow_down(self, key: FlowKey, now_s: float) -> bool:
        """Take a congestion notification of this site's NIC; return whether its flow is known."""
        incoming = self._pairs.incoming_of(key)
        flow = None if incoming is None else self._flows.get(incoming)
        if flow is not None:
            flow.rate.notify(now_s)
        return flow is not None

    def _learn(self, view: RoceView, now_s: float) -> IncomingFlow | None:
        """Find the one flow that an answer belongs to, and pair the two directions."""
        ends = swap_ends(view.ends)
        flow = self._unpaired.get((ends, view.source_port))
        if flow is None or flow.is_shared or not flow.is_pending(view.psn):
            return None
        if self._pairs.is_shared(ends, view.source_port) or not self._pairs.join(view.key, flow.key):
            return None
        self._pair(flow, view.queue_pair)
        self._dirty[flow] = None
        self._feedback_s = now_s  # ahead of the answer, which tells the near gateway how to acknowledge
        return flow

    def _pair(self, flow: IncomingFlow, queue_pair: int) -> None:
        flow.queue_pair = queue_pair
        self._leave_unpaired(flow)

    def fail(
        self,
        flow: IncomingFlow,
        reason: FlowFailure,
        now_s: float,
        out: list[GatewayInstruction],
        *,
        tells: bool = True,
    ) -> None:
        """Give up a flow and free its memory; the far gateway learns it."""
        if flow.failed is not None:
            return
        flow.failed = reason
        flow.clear()
        self._dirty.pop(flow, None)
        if tells and not flow.is_orphan:
            self._told[flow.flow] = reason
            self._feedback_s = now_s
        out.append(QueuePairFailed(*flow.key, reason))
        self.failed.append(flow)

    def _close(self, flow: IncomingFlow) -> None:
        flow.clear()
        self._pairs.part_incoming(flow.key)
        self._pairs.leave(flow.key, flow.source_port)
        self._flows.pop(flow.key, None)
        if self._by_id.get(flow.flow) is flow:  # not the one that a restarted peer gave the same number
            del self._by_id[flow.flow]
            self._closed[flow.flow] = None
            if len(self._closed) > _MAX_CLOSED:
                del self._closed[next(iter(self._closed))]
        self._dirty.pop(flow, None)
        self._leave_unpaired(flow)

    def _leave_unpaired(self, flow: IncomingFlow) -> None:
        place = flow.key[0], flow.source_port
        if self._unpaired.get(place) is flow:
            del self._unpaired[place]

    # Time

    def tick(self, now_s: float, out: list[GatewayInstruction]) -> None:
        """Do what is due: ask for missing frames, hand over, resend to NICs, give feedback."""
        for flow in self._timers.pop_due(now_s):
            if self._flows.get(flow.key) is not flow:
                continue
            if now_s - flow.used_s >= 2 * self.settings.idle_s and flow.is_done:
                self._close(flow)
                continue
            if flow.failed is None:
                if now_s >= flow.suspect_s:
                    self.fail(flow, FlowFailure.GAP, now_s, out)
                elif now_s >= flow.nic_s:
                    self._hand_again(flow, now_s, out)
                self._hand_over(flow, now_s, out)
                if now_s >= flow.unproven_s:
                    flow.release_unproven()
                    self._mark_dirty(flow, now_s)
                if flow.ask_s <= now_s:
                    self._dirty[flow] = None
                    self._feedback_s = now_s
            self._set_timer(flow, now_s)
        if self._feedback_s <= now_s:
            self._give_feedback(now_s, out)

    def _give_feedback(self, now_s: float, out: list[GatewayInstruction]) -> None:
        self._feedback_s = math.inf
        if not self._link.is_known:
            return
        entries: list[bytes] = []
        for flow in self._dirty:
            if not flow.is_orphan:
                missing = flow.missing(now_s, self._link.ask_again_s)
                entries.append(pack_feedback(flow.feedback(now_s, missing)))
                if missing:
                    self._set_timer(flow, now_s)
        failures = [pack_failure(FailureEntry(flow, False, reason)) for flow, reason in self._told.items()]
        self._dirty.clear()
        self._told.clear()
        for kind, found in ((DatagramKind.FEEDBACK, entries), (DatagramKind.FAILED, failures)):
            if found:
                out += [SendOnLink(data) for data in build_list(kind, self._link.origin, found)]

    def _mark_dirty(self, flow: IncomingFlow, now_s: float) -> None:
        if flow.failed is None and not flow.is_orphan:
            self._dirty[flow] = None
            self._ask_feedback(now_s)

    def _ask_feedback(self, now_s: float) -> None:
        due_s = now_s + self._feedback_interval_s
        if due_s < self._feedback_s:
            self._feedback_s = due_s

    def _set_timer(self, flow: IncomingFlow, now_s: float) -> None:
        due_s = min(flow.next_s(BURST_S / 2), now_s + 2 * self.settings.idle_s)
        if due_s < flow.timer_s:
            self._timers.set(flow, max(now_s + 1e-6, due_s))
