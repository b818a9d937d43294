"""`LowerBound`: seconds below which no schedule ends, from any state of its making."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from isthmus.schedule.searched.compute_orders import step_durations
from isthmus.schedule.searched.pipeline_costs import PipelineCosts


class LowerBound:
    """Bounds on a step: each stage's own work, the chain of the last micro-batch, and round trips within memory."""

    def __init__(self, costs: PipelineCosts, num_micro_batches: int, num_chunks: int = 1) -> None:
        self._costs, self._total, self._num_chunks = costs, num_micro_batches, num_chunks
        self._durations = step_durations(costs, 1)
        self._room = [one.max_in_flight for one in costs.stages]
        self._tails_s = [one.tail_s for one in costs.stages]
        stages = range(costs.num_stages - 1)
        self._down_s = [costs.hop(s, s + 1).total_s for s in stages]
        self._up_s = [costs.hop(s + 1, s).total_s for s in stages]
        self._trips_s = self._round_trips_s()

    def of_step_s(self) -> float:
        """Return a bound on the whole step."""
        count = self._costs.num_stages
        if self._num_chunks == 1:
            return self.of_state_s((0,) * (3 * count), (0.0,) * count, ((),) * (2 * count))
        own_s = [sum(each[:3]) / self._num_chunks for each in self._durations]
        heads = [0.0, *itertools.accumulate(
            each[0] / self._num_chunks + hop_s for each, hop_s in zip(self._durations, self._down_s, strict=False)
        )]  # fmt: skip
        return max(
            head_s + self._total * self._num_chunks * each_s + tail_s
            for head_s, each_s, tail_s in zip(heads, own_s, self._tails_s, strict=True)
        )

    def of_state_s(self, counts: Sequence[int], times: Sequence[float], arrivals: Sequence[Sequence[float]]) -> float:
        """Return a bound on the step from a state, with one chunk per stage.

        `counts`, (3 num_stages,), are the forwards, input gradients and weight gradients placed at each stage, `times`
        begins with the end of each stage's last one, `arrivals`, (2 num_stages,), are the forwards and the gradients on
        their way to each stage.
        """
        ends = self._last_forwards_s(counts, times, arrivals)
        last = len(ends) - 1
        bound_s = gradient_s = 0.0
        for stage in range(last, -1, -1):
            done, inputs, weights = counts[3 * stage : 3 * stage + 3]
            forward_s, input_s, weight_s, _ = self._durations[stage]
            left, free_s = self._total - inputs, times[stage]
            work_s = (self._total - done) * forward_s + left * input_s
            if left:
                gradient_s = max(max(gradient_s, ends[stage]) + input_s, free_s + work_s)
                if stage < last and (queue := arrivals[2 * stage + 1]):
                    gradient_s = max(gradient_s, queue[0] + left * input_s)
                bound_s = max(bound_s, gradient_s + weight_s + self._tails_s[stage])
            elif stage and (queue := arrivals[2 * stage - 1]):
                gradient_s = queue[-1] - self._up_s[stage - 1]
            else:
                gradient_s = 0.0
            bound_s = max(bound_s, free_s + work_s + (self._total - weights) * weight_s + self._tails_s[stage])
            if stage:
                gradient_s += self._up_s[stage - 1]
        return bound_s

    def _last_forwards_s(
        self, counts: Sequence[int], times: Sequence[float], arrivals: Sequence[Sequence[float]]
    ) -> list[float]:
        """Return a bound on the end of each stage's last forward, 0 where it is placed and its message arrived."""
        ends: list[float] = []
        end_s = 0.0
        for stage, (forward_s, input_s, weight_s, _) in enumerate(self._durations):
            done, inputs, weights = counts[3 * stage : 3 * stage + 3]
            left = self._total - done
            if left:
                first_s = times[stage]
                if stage and (queue := arrivals[2 * stage]):
                    first_s = max(first_s, queue[0])
                freed = self._total - self._room[stage]
                own_s = left * forward_s + max(0, freed - inputs) * input_s + max(0, freed - weights) * weight_s
                trips_s = (left - 1) // self._room[stage] * self._trips_s[stage]
                chain_s = end_s + forward_s if stage else 0.0
                end_s = max(chain_s, times[stage] + own_s, first_s + left * forward_s, first_s + trips_s + forward_s)
            elif stage < len(self._down_s) and (queue := arrivals[2 * stage + 2]):
                end_s = queue[-1] - self._down_s[stage]
            else:
                end_s = 0.0
            ends.append(end_s)
            if stage < len(self._down_s):
                end_s += self._down_s[stage]
        return ends

    def _round_trips_s(self) -> list[float]:
        """Return the least seconds from the start of a forward to the end of its weight gradient, (num_stages,)."""
        found, later_s = [], 0.0
        for stage in range(self._costs.num_stages - 1, -1, -1):
            forward_s, input_s, weight_s, _ = self._durations[stage]
            if stage < len(self._down_s):
                later_s += self._down_s[stage] + self._up_s[stage]
            later_s += forward_s + input_s
            found.append(later_s + weight_s)
        return found[::-1]
