"""`OutgoingSide`: frames of this site's NICs towards the far gateway: taken, kept, paced, sent again, given up."""

from __future__ import annotations

import math
from collections import deque

from isthmus.wan.roce.gateway.connections import Connections
from isthmus.wan.roce.gateway.gateway_datagram import (
    DATA_BYTES,
    FRAME_PLACE,
    NO_QUEUE_PAIR,
    NUMBER_SPAN,
    DatagramKind,
    FailureEntry,
    FeedbackEntry,
    FlowFailure,
    build_list,
    data_head,
    pack_failure,
    pack_flow,
)
from isthmus.wan.roce.gateway.gateway_events import GatewayInstruction, QueuePairFailed, SendOnLink, SendToNic
from isthmus.wan.roce.gateway.gateway_settings import GatewaySettings
from isthmus.wan.roce.gateway.held_bytes import HeldBytes
from isthmus.wan.roce.gateway.incoming_flow import reverse_key
from isthmus.wan.roce.gateway.link_state import LinkState
from isthmus.wan.roce.gateway.outgoing_flow import NO_START, OutgoingFlow
from isthmus.wan.roce.gateway.queue_pairs import QueuePairs
from isthmus.wan.roce.request_order import READS_AND_ATOMICS, REQUESTS, STARTS, Place
from isthmus.wan.roce.roce_opcodes import PSN_SPAN, psn_distance
from isthmus.wan.roce.roce_view import FlowKey, RoceView
from isthmus.wan.roce.timer_heap import TimerHeap

BURST_S = 1e-3
"""Time whose bytes may leave at once after a pause."""

MIN_BURST_BYTES = 16_384
TURN_BYTES = 4096
"""Bytes of a flow beyond which another one has its turn."""

REUSE_QUIET_S = 1.0
"""Quiet time after which an earlier number begins a new life of a queue pair with nothing outstanding."""

DRAIN_S = 20e-3
"""Time in which the part of a queue above its mark should fall to 1/e; a slower one brings notifications."""

MAX_STARTS_AHEAD = 5
LOW_BITS = NUMBER_SPAN - 1
_LOOK_FOR_IDLE = 64


class OutgoingSide:
    """All outgoing flows; every method appends what is to be done to `out`."""

    def __init__(self, settings: GatewaySettings, link: LinkState, pairs: QueuePairs, connections: Connections) -> None:
        self.settings, self._link, self._pairs, self._connections = settings, link, pairs, connections
        self.held = HeldBytes(settings.max_total_bytes)
        self.num_refused = self.num_sent = self.num_sent_again = 0
        self.num_taken = self.num_absorbed = self.num_notified = 0
        self.failed: list[OutgoingFlow] = []
        """Flows that failed since this list was last emptied."""
        self._flows: dict[FlowKey, OutgoingFlow] = {}
        self._by_id: dict[int, OutgoingFlow] = {}
        self._ready: deque[OutgoingFlow] = deque()
        self._timers = TimerHeap[OutgoingFlow]()
        self._next_flow = 1
        self._burst_bytes = max(MIN_BURST_BYTES, settings.link_bytes_per_s * BURST_S)
        self._allowance_bytes, self._filled_s = self._burst_bytes, 0.0
        self._mark_bytes = settings.queue_mark_bytes

    def __len__(self) -> int:
        return len(self._flows)

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes of frames that were not sent yet."""
        return self.held.unsent

    def next_s(self, now_s: float) -> float:
        """Return when something is due."""
        if not self._ready or not self._link.is_known:
            return self._timers.next_s
        wait_s = max(0.0, -self._allowance_bytes / self.settings.link_bytes_per_s) if self._allowance_bytes <= 0 else 0
        return min(self._timers.next_s, max(now_s, self._filled_s + wait_s + 1e-6))

    def flow(self, key: FlowKey) -> OutgoingFlow | None:
        """Return the flow of a key."""
        return self._flows.get(key)

    # From the NIC

    def take(self, view: RoceView, now_s: float, out: list[GatewayInstruction]) -> None:
        """Take a frame of a NIC, once and in the order of its number."""
        flow = self._flows.get(view.key) or self._open(view, now_s)
        if flow is None:
            self.num_refused += 1
            return
        is_request = view.opcode in REQUESTS
        if is_request and not flow.order.is_next(view.psn):
            self._take_misplaced(flow, view, now_s, out)
        elif flow.failed is not None:
            if is_request:
                self._refuse(flow, view.psn, out)
        elif not flow.has_room(view.frame):
            self.num_refused += 1
            self._notify(flow, now_s, out)
        else:
            self._accept(flow, view, now_s, out, is_request=is_request)

    def _accept(
        self, flow: OutgoingFlow, view: RoceView, now_s: float, out: list[GatewayInstruction], *, is_request: bool
    ) -> None:
        self.num_taken += 1
        flow.used_s = now_s
        if is_request:
            flow.starts_ahead = NO_START
            answer = flow.responder.taken(view, flow.order.take(view))
            if answer is not None:
                out.append(SendToNic(answer))
        flow.add(view.frame)
        if not flow.is_ready:
            flow.is_ready = True
            self._ready.append(flow)
        if view.has_congestion_mark or flow.unsent_bytes > self._mark_bytes / (len(self._ready) or 1):
            self._notify(flow, now_s, out)

    def _take_misplaced(self, flow: OutgoingFlow, view: RoceView, now_s: float, out: list[GatewayInstruction]) -> None:
        """Take a request that is not the next one: a resend, a gap, or a queue pair that was set up again."""
        place = flow.order.place(view.psn)
        if view.opcode in STARTS and self._begins_again(flow, view, place, now_s):
            self.num_absorbed += 1
            self._close(flow)
            self.take(view, now_s, out)
        elif flow.failed is not None:
            self._refuse(flow, view.psn, out)
        elif place is Place.BEHIND:
            self._take_resend(flow, view, now_s, out)
        elif place is Place.AHEAD and (answer := flow.responder.gap(flow.order.first_expected)):
            out.append(SendToNic(answer))

    def _begins_again(self, flow: OutgoingFlow, view: RoceView, place: Place, now_s: float) -> bool:
        if place is Place.ELSEWHERE:
            return True
        if place is Place.BEHIND:
            return (flow.is_done or flow.failed is not None) and now_s - flow.used_s >= REUSE_QUIET_S
        number, count = flow.starts_ahead
        flow.starts_ahead = view.psn, count + 1 if number == view.psn else 1
        return flow.starts_ahead[1] >= MAX_STARTS_AHEAD and now_s - flow.used_s >= REUSE_QUIET_S

    def _take_resend(self, flow: OutgoingFlow, view: RoceView, now_s: float, out: list[GatewayInstruction]) -> None:
        responder = flow.responder
        is_read, is_covered = view.opcode in READS_AND_ATOMICS, responder.covers(view.psn)
        if is_read and (is_covered or now_s - flow.read_again_s > self._link.timeout_s):
            if flow.has_room(view.frame):  # the response is lost; only the far NIC can make it again
                flow.read_again_s = now_s
                if is_covered:
                    responder.read_again(view.psn, flow.order.last_psn(view))
                flow.add(view.frame)
                self._make_ready(flow)
        elif is_covered:
            if (answer := responder.again()) is not None:
                out.append(SendToNic(answer))
        elif self._may_be_lost(flow, view.psn, now_s) and flow.has_room(view.frame):
            flow.rewound_s = now_s
            flow.order.rewind(view.psn)
            responder.rewind(view.psn)
            self._accept(flow, view, now_s, out, is_request=True)
            return
        self.num_absorbed += 1

    def _may_be_lost(self, flow: OutgoingFlow, psn: int, now_s: float) -> bool:
        """Return whether a resend has to cross the link: nothing at the far side makes up for what it resends."""
        first = flow.responder.first
        if first is not None and psn_distance(first, psn) < 0 and flow.responder.acked is None:
            return True
        return not flow.is_paired and now_s - flow.rewound_s > self._link.timeout_s

    def _open(self, view: RoceView, now_s: float) -> OutgoingFlow | None:
        if len(self._flows) >= self.settings.max_queue_pairs and not self._evict_idle(now_s):
            return None
        flow = OutgoingFlow(self._next_flow, view, self.settings, self.held)
        self._next_flow = self._next_flow % (2**32 - 1) + 1
        self._flows[flow.key] = self._by_id[flow.flow] = flow
        flow.used_s = now_s
        self._timers.set(flow, now_s + self.settings.idle_s)
        self._pairs.enter(flow.key, flow.source_port)
        if (new := self._connections.take(flow.key)) is not None:
            self._pairs.join(flow.key, new.back)
            flow.order.begin(new.first_psn, new.mtu_bytes)
            flow.responder.begin(view._replace(ends=new.back[0], queue_pair=new.sender), new.first_psn)
        flow.is_paired = self._pairs.incoming_of(flow.key) is not None
        return flow

    def begin_anew(self, key: FlowKey) -> None:
        """End the flow of a queue pair that is set up again."""
        if (flow := self._flows.get(key)) is not None:
            self._close(flow)

    def _evict_idle(self, now_s: float) -> bool:
        for _, flow in zip(range(_LOOK_FOR_IDLE), list(self._flows.values()), strict=False):
            if flow.is_done and now_s - flow.used_s >= REUSE_QUIET_S:
                self._close(flow)
                return True
        return False

    def _close(self, flow: OutgoingFlow) -> None:
        flow.clear()
        self._pairs.part_outgoing(flow.key)
        self._pairs.leave(flow.key, flow.source_port)
        self._flows.pop(flow.key, None)
        self._by_id.pop(flow.flow, None)

    def _notify(self, flow: OutgoingFlow, now_s: float, out: list[GatewayInstruction]) -> None:
        """Tell the NIC to slow down, unless the queue shrinks fast enough since the last notification."""
        template, spent_s = flow.responder.template, now_s - flow.notified_s
        if template is None or spent_s < self.settings.near_notify_interval_s:
            return
        excess = max(0.0, flow.notified_bytes - self._mark_bytes)
        most = flow.notified_bytes - excess * -math.expm1(-spent_s / DRAIN_S)
        flow.notified_s, flow.notified_bytes = now_s, flow.queue_bytes
        if not excess or flow.queue_bytes > most:
            self.num_notified += 1
            out.append(SendToNic(template.cnp))

    def _refuse(self, flow: OutgoingFlow, psn: int, out: list[GatewayInstruction]) -> None:
        if (answer := flow.responder.refuse(psn)) is not None:
            out.append(SendToNic(answer))

    # From the far gateway

    def feedback(self, entry: FeedbackEntry, now_s: float, out: list[GatewayInstruction]) -> None:
        """Take what the far gateway says of a flow."""
        flow = self._by_id.get(entry.flow)
        if flow is None or flow.failed is not None:
            return
        sample_s, tries = flow.take_feedback(entry, now_s, self._link.least_round_trip_s)
        if sample_s is not None:
            self._link.sample(sample_s)
        is_new = entry.queue_pair != NO_QUEUE_PAIR and not flow.is_paired
        if is_new and not self._pairs.is_shared(flow.key[0], flow.source_port):
            flow.is_paired = self._pairs.join(flow.key, reverse_key(flow.key[0], entry.queue_pair & 0xFFFFFF))
        if entry.held_bytes > self._mark_bytes or flow.rate_bytes_per_s < math.inf:
            flow.adapt_rate(entry, self._mark_bytes, self.settings.link_bytes_per_s)
        if tries >= self.settings.max_tries:
            self.fail(flow, FlowFailure.LINK, out)
        elif flow.can_send:
            self._make_ready(flow)

    def answered(self, key: FlowKey, view: RoceView, out: list[GatewayInstruction]) -> bool:
        """Note that the far NIC's answer goes to this site's; return whether it does.

        `key` is that of the requests. An acknowledgement that the NIC has had stays here; an error for a request that
        was acknowledged fails the queue pair.
        """
        flow = self._flows.get(key)
        if flow is None:
            return True
        is_error = view.opcode == 0x11 and view.syndrome > 0x60
        if is_error and flow.failed is None and flow.responder.covers(view.psn):
            self.fail(flow, FlowFailure.REFUSED, out)
            return False
        if flow.order.skip(flow.responder.answered_psn(view)):
            flow.responder.skip()
        is_needed, follows = flow.responder.genuine(view)
        if is_needed:
            out.append(SendToNic(view.frame))
        if follows is not None and flow.failed is None:
            out.append(SendToNic(follows))
        return False

    def failed_there(self, number: int, reason: FlowFailure, out: list[GatewayInstruction]) -> None:
        """Give up a flow that the far gateway has given up."""
        if (flow := self._by_id.get(number)) is not None and flow.failed is None:
            self.fail(flow, reason, out, tells=False)

    def fail(
        self, flow: OutgoingFlow, reason: FlowFailure, out: list[GatewayInstruction], *, tells: bool = True
    ) -> None:
        """Give up a flow: free its memory, and refuse what its NIC has outstanding and sends from now on."""
        if flow.failed is not None:
            return
        flow.failed = reason
        flow.clear()
        if flow.order.has_begun:
            acked = flow.responder.acked
            first = flow.order.first_expected - 1 if acked is None else acked + 1
            self._refuse(flow, first % PSN_SPAN, out)
        out.append(QueuePairFailed(*flow.key, reason))
        if tells and self._link.is_known:
            entry = pack_failure(FailureEntry(flow.flow, True, reason))
            out += [SendOnLink(data) for data in build_list(DatagramKind.FAILED, self._link.origin, [entry])]
        self.failed.append(flow)

    def begin_again(self, now_s: float) -> None:
        """Send all that is kept to a far gateway that has lost its table."""
        self._by_id.clear()
        for flow in self._flows.values():
            flow.begin_again(self._next_flow)
            self._by_id[self._next_flow] = flow
            self._next_flow = self._next_flow % (2**32 - 1) + 1
            if flow.can_send:
                self._make_ready(flow)
        self._allowance_bytes, self._filled_s = self._burst_bytes, now_s

    # Time

    def tick(self, now_s: float, out: list[GatewayInstruction]) -> None:
        """Do what is due: resends of what was not heard of, flows that may send again, idle ones."""
        probes: list[bytes] = []
        forgotten: list[bytes] = []
        for flow in self._timers.pop_due(now_s):
            if self._flows.get(flow.key) is not flow:
                continue
            if flow.is_done and now_s - flow.used_s >= self.settings.idle_s:
                forgotten.append(pack_flow(flow.flow))
                self._close(flow)
                continue
            if flow.can_send:
                self._make_ready(flow)
            if flow.failed is None and self._link.is_known and flow.awaits_feedback:
                self._check_silence(flow, now_s, out, probes)
            self._timers.set(flow, self._due_s(flow, now_s))
        for kind, entries in ((DatagramKind.PROBE, probes), (DatagramKind.FORGET, forgotten)):
            if entries and self._link.is_known:
                out += [SendOnLink(data) for data in build_list(kind, self._link.origin, entries)]

    def _check_silence(
        self, flow: OutgoingFlow, now_s: float, out: list[GatewayInstruction], probes: list[bytes]
    ) -> None:
        if now_s < flow.silent_s(self._link.timeout_s):
            return
        flow.num_silent += 1
        flow.probed_s = now_s
        if flow.num_silent > self.settings.max_tries:
            self.fail(flow, FlowFailure.LINK, out)
        elif flow.oldest_sent_s() is not None:
            if flow.send_oldest_again() >= self.settings.max_tries:
                self.fail(flow, FlowFailure.LINK, out)
            else:
                self._make_ready(flow)
        else:
            probes.append(pack_flow(flow.flow))

    def _due_s(self, flow: OutgoingFlow, now_s: float) -> float:
        if flow.failed is not None or not flow.awaits_feedback:
            return max(now_s + 1e-3, flow.used_s + self.settings.idle_s)
        return max(now_s + 1e-3, flow.silent_s(self._link.timeout_s))

    def pump(self, now_s: float, out: list[GatewayInstruction]) -> None:
        """Send frames of all flows in turns, at the link's rate and their own."""
        if not self._ready or not self._link.is_known:
            return
        settings, ready = self.settings, self._ready
        rate = settings.link_bytes_per_s
        allowance = min(self._burst_bytes, self._allowance_bytes + (now_s - self._filled_s) * rate)
        self._filled_s = now_s
        overhead = DATA_BYTES + settings.datagram_overhead_bytes
        heads = [data_head(self._link.origin, is_shared=one) for one in (False, True)]
        timeout_s, is_shared, pack = self._link.timeout_s, self._pairs.is_shared, FRAME_PLACE.pack
        while ready and allowance > 0:
            flow = ready.popleft()
            flow.is_ready = False
            if now_s < flow.due_s:
                self._timers.set(flow, flow.due_s)
                continue
            head, most = heads[is_shared(flow.key[0], flow.source_port)], min(allowance, TURN_BYTES)
            turn_bytes, next_frame, number_of_flow = 0, flow.next_frame, flow.flow
            while turn_bytes < most and (found := next_frame(now_s)) is not None:
                number, frame, is_again = found
                self.num_sent += 1
                self.num_sent_again += is_again
                out.append(SendOnLink(head + pack(number_of_flow, number & LOW_BITS) + frame))
                turn_bytes += len(frame) + overhead
            if not turn_bytes:
                continue
            allowance -= turn_bytes
            if flow.rate_bytes_per_s < math.inf:
                flow.due_s = max(flow.due_s, now_s - BURST_S) + turn_bytes / flow.rate_bytes_per_s
            self._timers.set(flow, now_s + timeout_s)
            if flow.can_send:
                flow.is_ready = True
                ready.append(flow)
        self._allowance_bytes = allowance

    def _make_ready(self, flow: OutgoingFlow) -> None:
        if not flow.is_ready:
            flow.is_ready = True
            self._ready.append(flow)
