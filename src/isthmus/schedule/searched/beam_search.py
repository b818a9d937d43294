"""`beam_search`: the best active schedules of a small pipeline, breadth first; exact where nothing was dropped.

Micro-batches are alike, so that each stage takes them in order and a state is a count of forwards, input gradients and
weight gradients by stage. Memory is then a precedence: with room for n micro-batches, forward k follows weight gradient
k - n. States are extended as B. Giffler and G. L. Thompson, "Algorithms for Solving Production-Scheduling Problems",
1960, generate active schedules, of which one is optimal. Of two states with equal counts, the one that is later
nowhere remains. A state is dropped if it cannot end before the best schedule known, or if `max_states` are better.
"""

from __future__ import annotations

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
from isthmus.schedule.searched.lower_bound import LowerBound
from isthmus.schedule.searched.pipeline_costs import PipelineCosts

_SLACK = 1 - 1e-9
"""Differences below this share of the step are rounding."""


@dataclass(frozen=True, kw_only=True)
class BeamResult:
    """What the search found."""

    orders: ComputeOrders | None
    """The best orders; None if none is faster than the schedule that was known."""
    step_s: float
    """Seconds of the best schedule, or of the known one."""
    bound_s: float
    """No schedule of one chunk per stage within the memory is faster."""


def beam_search(costs: PipelineCosts, num_micro_batches: int, known_s: float, max_states: int) -> BeamResult:
    """Return the best schedule of one chunk per stage faster than `known_s`, and a proven bound.

    Keeps at most `max_states` states of equally many computations. The result is optimal if `bound_s` equals `step_s`.
    """
    problem = _Problem(costs, num_micro_batches)
    states = [problem.first_state()]
    best_s, best, dropped_s = known_s, None, float("inf")
    for _ in range(problem.num_steps):
        grown: dict[tuple[int, ...], list[_State]] = {}
        for state in states:
            if state.bound_s >= best_s * _SLACK:
                continue
            for child in problem.children(state):
                if child.bound_s < best_s * _SLACK:
                    _keep(grown.setdefault(child.counts, []), child)
        states = [state for group in grown.values() for state in group]
        if len(states) > max_states:
            states.sort(key=lambda state: (state.bound_s, state.times))
            dropped_s = min(dropped_s, states[max_states].bound_s)
            states = states[:max_states]
    for state in states:
        if state.bound_s < best_s:  # all computations are placed: the bound is the end
            best_s, best = state.bound_s, state
    return BeamResult(
        orders=None if best is None else best.orders(costs.num_stages), step_s=best_s, bound_s=min(best_s, dropped_s)
    )


class _State:
    """Some computations placed: counts (3 per stage), and the times that the rest depends on."""

    __slots__ = ("arrivals", "bound_s", "counts", "parent", "step", "times")

    def __init__(
        self,
        counts: tuple[int, ...],
        times: tuple[float, ...],
        arrivals: tuple[tuple[float, ...], ...],
        parent: _State | None,
        step: tuple[int, int],
    ) -> None:
        self.counts, self.times, self.arrivals, self.parent, self.step = counts, times, arrivals, parent, step
        self.bound_s = 0.0

    def orders(self, num_stages: int) -> ComputeOrders:
        """Return the orders that lead here."""
        orders: list[list[Step]] = [[] for _ in range(num_stages)]
        state = self
        while state.parent is not None:
            stage, code = state.step
            orders[stage].append((code, 0))
            state = state.parent
        return tuple(tuple(reversed(order)) for order in orders)

    def is_covered_by(self, other: _State) -> bool:
        """Return whether `other`, with equal counts, is later nowhere."""
        for mine, theirs in zip(self.times, other.times, strict=True):
            if theirs > mine:
                return False
        for own, others in zip(self.arrivals, other.arrivals, strict=True):
            for mine, theirs in zip(own, others, strict=True):
                if theirs > mine:
                    return False
        return True


def _keep(group: list[_State], state: _State) -> None:
    """Add `state` to those with its counts unless one covers it; remove those that it covers."""
    for other in group:
        if state.is_covered_by(other):
            return
    group[:] = [other for other in group if not other.is_covered_by(state)]
    group.append(state)


class _Problem:
    """The constants of a search. `arrivals[2 s]` are forwards on their way to stage `s`, `[2 s + 1]` gradients."""

    def __init__(self, costs: PipelineCosts, num_micro_batches: int) -> None:
        self.num_stages, self.total = costs.num_stages, num_micro_batches
        self.durations = step_durations(costs, 1)
        self.joined = [not one.splits_backward for one in costs.stages]
        self.room = [one.max_in_flight for one in costs.stages]
        self.bound = LowerBound(costs, num_micro_batches)
        self.down = [costs.hop(s, s + 1) for s in range(costs.num_stages - 1)]
        self.up = [costs.hop(s + 1, s) for s in range(costs.num_stages - 1)]
        self.num_steps = num_micro_batches * sum(2 if joined else 3 for joined in self.joined)

    def first_state(self) -> _State:
        """Return the state without a computation. `times` are the ends of stages and links, down then up."""
        times = (0.0,) * (self.num_stages + 2 * len(self.down))
        return _State((0,) * (3 * self.num_stages), times, ((),) * (2 * self.num_stages), None, (0, 0))

    def children(self, state: _State) -> list[_State]:
        """Return the states with one computation more, on the stage that can complete one first."""
        first_end_s, chosen, options = float("inf"), -1, list[tuple[int, float]]()
        for stage in range(self.num_stages):
            ready = self._ready(state, stage)
            for code, start_s in ready:
                end_s = start_s + self.durations[stage][code]
                if end_s < first_end_s:
                    first_end_s, chosen, options = end_s, stage, ready
        return [
            self._extend(state, chosen, code, start_s)
            for code, start_s in options
            if start_s < first_end_s or start_s + self.durations[chosen][code] <= first_end_s
        ]

    def _ready(self, state: _State, stage: int) -> list[tuple[int, float]]:
        """Return the computations of `stage` whose inputs are placed, with their earliest start."""
        done, inputs, weights = state.counts[3 * stage : 3 * stage + 3]
        free_s, ready = state.times[stage], []
        if done < self.total and done - weights < self.room[stage]:
            if stage == 0:
                ready.append((FORWARD, free_s))
            elif queue := state.arrivals[2 * stage]:
                ready.append((FORWARD, max(free_s, queue[0])))
        if inputs < done:
            code = BACKWARD if self.joined[stage] else BACKWARD_INPUT
            if stage == self.num_stages - 1:
                ready.append((code, free_s))
            elif queue := state.arrivals[2 * stage + 1]:
                ready.append((code, max(free_s, queue[0])))
        if weights < inputs:
            ready.append((BACKWARD_WEIGHT, free_s))
        return ready

    def _extend(self, state: _State, stage: int, code: int, start_s: float) -> _State:
        counts, times, arrivals = list(state.counts), list(state.times), list(state.arrivals)
        end_s = times[stage] = start_s + self.durations[stage][code]
        last, links = self.num_stages - 1, self.num_stages
        if code == FORWARD:
            counts[3 * stage] += 1
            arrivals[2 * stage] = arrivals[2 * stage][1:]
            if stage < last:
                hop, link = self.down[stage], links + stage
                times[link] = max(end_s, times[link]) + hop.transfer_s
                arrivals[2 * stage + 2] = (*arrivals[2 * stage + 2], times[link] + hop.delay_s)
        elif code == BACKWARD_WEIGHT:
            counts[3 * stage + 2] += 1
        else:
            counts[3 * stage + 1] += 1
            counts[3 * stage + 2] += code == BACKWARD
            arrivals[2 * stage + 1] = arrivals[2 * stage + 1][1:]
            if stage:
                hop, link = self.up[stage - 1], links + last + stage - 1
                times[link] = max(end_s, times[link]) + hop.transfer_s
                arrivals[2 * stage - 1] = (*arrivals[2 * stage - 1], times[link] + hop.delay_s)
        child = _State(tuple(counts), tuple(times), tuple(arrivals), state, (stage, code))
        child.bound_s = max(state.bound_s, self.bound.of_state_s(child.counts, child.times, child.arrivals))
        return child
