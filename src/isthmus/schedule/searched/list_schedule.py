"""`list_schedule`: a schedule made greedily, event by event, under a policy of few numbers."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from isthmus.schedule.searched.compute_orders import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    ComputeOrders,
    Step,
    step_durations,
)
from isthmus.schedule.searched.pipeline_costs import PipelineCosts


@dataclass(frozen=True, kw_only=True)
class ListPolicy:
    """What a stage does next, where several computations are ready."""

    lead: tuple[int, ...]
    """Forwards that each stage may be ahead of its input gradients, over all chunks, (num_stages,)."""
    forward_first: bool = False
    """Whether a ready forward goes before a ready input gradient."""
    idle_share: float = 0.0
    """The part of a weight gradient's time that a stage idles if a message is known to arrive within it."""


def list_schedule(
    costs: PipelineCosts, num_micro_batches: int, num_chunks: int, policy: ListPolicy
) -> tuple[ComputeOrders, float]:
    """Return the orders that `policy` makes within each stage's memory, and the seconds of the step.

    A stage prefers its input gradients and forwards to weight gradients, later chunks to earlier ones, and computes
    weight gradients while it would idle, or when only they free the memory for a forward that is ready.
    """
    state = _ListState(costs, num_micro_batches, num_chunks, policy)
    events: list[tuple[float, int]] = [(0.0, stage) for stage in range(costs.num_stages)]
    while events:
        now_s, stage = heapq.heappop(events)
        while events and events[0] == (now_s, stage):
            heapq.heappop(events)
        if state.free_s[stage] > now_s:
            continue
        step = state.choose(stage, now_s)
        if step is not None:
            end_s = state.run(stage, step, now_s)
            heapq.heappush(events, (end_s, stage))
            if state.arrival is not None:
                heapq.heappush(events, state.arrival)
    tails = (free_s + one.tail_s for free_s, one in zip(state.free_s, costs.stages, strict=True))
    return tuple(map(tuple, state.orders)), max(tails)


class _ListState:
    """Counts, arrivals and clocks of all stages while a schedule is made."""

    def __init__(self, costs: PipelineCosts, num_micro_batches: int, num_chunks: int, policy: ListPolicy) -> None:
        self.num_stages, self.num_chunks, self.total = costs.num_stages, num_chunks, num_micro_batches
        self.policy, self.later_first = policy, range(num_chunks - 1, -1, -1)
        virtual_stages = range(costs.num_stages * num_chunks)
        self.last = virtual_stages[-1]
        self.durations = step_durations(costs, num_chunks)
        self.joined = [not one.splits_backward for one in costs.stages]
        self.room = [min(one.max_in_flight, num_micro_batches) * num_chunks for one in costs.stages]
        self.hops = {
            (a, b): (costs.hop(a, b).transfer_s, costs.hop(a, b).delay_s)
            for a in range(costs.num_stages)
            for b in ((a + 1) % costs.num_stages, (a - 1) % costs.num_stages)
        }
        self.free_s = [0.0] * costs.num_stages
        self.link_free_s = dict.fromkeys(self.hops, 0.0)
        self.counts = [[0, 0, 0] for _ in virtual_stages]
        self.forwards: list[list[float]] = [[] for _ in virtual_stages]
        self.gradients: list[list[float]] = [[] for _ in virtual_stages]
        self.forwards[0] = [0.0] * num_micro_batches
        self.orders: list[list[Step]] = [[] for _ in range(costs.num_stages)]
        self.held, self.ahead = [0] * costs.num_stages, [0] * costs.num_stages
        self.arrival: tuple[float, int] | None = None
        """When the message of the last computation arrives, and at which stage."""

    def choose(self, stage: int, now_s: float) -> Step | None:
        """Return what `stage` computes now, None if it waits."""
        gradient, gradient_s = self._next_gradient(stage, now_s)
        forward, forward_s, waits_for_memory = self._next_forward(stage, now_s)
        if forward >= 0 and (self.policy.forward_first or gradient < 0):
            return FORWARD, forward
        if gradient >= 0:
            return (BACKWARD if self.joined[stage] else BACKWARD_INPUT), gradient
        weight = next((c for c in self.later_first if self._defers(stage, c)), -1)
        if weight < 0:
            return None
        patient_s = now_s + self.policy.idle_share * self.durations[stage][BACKWARD_WEIGHT]
        computes = waits_for_memory or min(gradient_s, forward_s) >= patient_s
        return (BACKWARD_WEIGHT, weight) if computes else None

    def _defers(self, stage: int, chunk: int) -> bool:
        """Return whether a weight gradient is left to compute."""
        _, inputs, weights = self.counts[chunk * self.num_stages + stage]
        return weights < inputs

    def _next_gradient(self, stage: int, now_s: float) -> tuple[int, float]:
        """Return the chunk whose input gradient is ready, -1 if none is, and when the next one will be."""
        next_s = math.inf
        for chunk in self.later_first:
            virtual = chunk * self.num_stages + stage
            number = self.counts[virtual][1]
            if number < len(self.gradients[virtual]):
                arrived_s = self.gradients[virtual][number]
                if arrived_s <= now_s:
                    return chunk, next_s
                next_s = min(next_s, arrived_s)
        return -1, next_s

    def _next_forward(self, stage: int, now_s: float) -> tuple[int, float, bool]:
        """Return the chunk whose forward is ready, when the next one will be, and if one waits for memory alone."""
        next_s, waits_for_memory = math.inf, False
        for chunk in self.later_first:
            virtual = chunk * self.num_stages + stage
            number = self.counts[virtual][0]
            if number == len(self.forwards[virtual]):
                continue
            arrived_s = self.forwards[virtual][number]
            if self.ahead[stage] >= self.policy.lead[stage] and not self._is_oldest(stage, number):
                continue
            if not self._fits(stage, chunk, number):
                waits_for_memory = waits_for_memory or arrived_s <= now_s
            elif arrived_s <= now_s:
                return chunk, next_s, waits_for_memory
            else:
                next_s = min(next_s, arrived_s)
        return -1, next_s, waits_for_memory

    def run(self, stage: int, step: Step, now_s: float) -> float:
        """Record a computation that starts now; return its end."""
        code, chunk = step
        virtual = chunk * self.num_stages + stage
        self.orders[stage].append(step)
        end_s = self.free_s[stage] = now_s + self.durations[stage][code]
        counts, target = self.counts[virtual], -1
        if code == FORWARD:
            counts[0] += 1
            self.held[stage] += 1
            self.ahead[stage] += 1
            target = virtual + 1
            if virtual == self.last:
                self.gradients[virtual].append(end_s)
        elif code == BACKWARD_WEIGHT:
            counts[2] += 1
            self.held[stage] -= 1
        else:
            counts[1] += 1
            self.ahead[stage] -= 1
            target = virtual - 1
            if code == BACKWARD:
                counts[2] += 1
                self.held[stage] -= 1
        self.arrival = self._send(stage, target, code, end_s) if 0 <= target <= self.last else None
        return end_s

    def _send(self, stage: int, target: int, code: int, end_s: float) -> tuple[float, int]:
        receiver = target % self.num_stages
        transfer_s, delay_s = self.hops.get((stage, receiver), (0.0, 0.0))
        left_s = max(end_s, self.link_free_s.get((stage, receiver), 0.0)) + transfer_s
        self.link_free_s[stage, receiver] = left_s
        (self.forwards if code == FORWARD else self.gradients)[target].append(left_s + delay_s)
        return left_s + delay_s, receiver

    def _is_oldest(self, stage: int, micro_batch: int) -> bool:
        """Return whether the stage has no earlier micro-batch to finish, so that it must never be held up."""
        return micro_batch == self.counts[stage][2]

    def _fits(self, stage: int, chunk: int, micro_batch: int) -> bool:
        """Return whether memory is left, and every micro-batch under way can then finish in its turn."""
        left = self.room[stage] - self.held[stage] - 1
        if left < 0 or self.num_chunks == 1:
            return left >= 0
        counts = [self.counts[c * self.num_stages + stage] for c in range(self.num_chunks)]
        for number in range(counts[0][2], max(counts[0][0], micro_batch + 1)):
            own = number == micro_batch
            needed = sum(done <= number and not (own and c == chunk) for c, (done, _, _) in enumerate(counts))
            if needed > left:
                return False
            left += self.num_chunks - needed - sum(weights > number for _, _, weights in counts)
        return True
