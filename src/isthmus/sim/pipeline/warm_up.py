"""`best_warm_up`: the fastest overlapped schedule within memory, found by simulating the candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from isthmus.core.errors import PlanError
from isthmus.core.plan import StageTime
from isthmus.schedule import overlapped, warm_up_counts
from isthmus.sim.links.simulated_link import SimulatedLink
from isthmus.sim.pipeline.run_pipeline import run_pipeline


def best_warm_up(
    stage_times: Sequence[StageTime],
    links: Mapping[tuple[int, int], SimulatedLink],
    message_bytes: float,
    num_micro_batches: int,
    max_in_flight: Sequence[int],
) -> tuple[tuple[int, ...], float]:
    """Return the warm-up counts of the fastest `overlapped` schedule that fits, and the seconds of its step.

    At most `max_in_flight[s]` micro-batches fit at stage `s`. The candidates are the results of
    `warm_up_counts` for every limit from 1 to the number of micro-batches, as far as they fit; more memory
    only adds candidates, so it never slows the result. Of equals the first wins, with the least memory. The
    other arguments are those of `run_pipeline`.
    """
    if len(max_in_flight) != len(stage_times) or min(max_in_flight) < 1:
        raise PlanError(f"max_in_flight is {list(max_in_flight)}", hint="one per stage, at least 1")
    count = len(stage_times)
    pass_s = [time.forward_s + time.backward_s for time in stage_times]
    hop_s = [_hop_s(links, stage, message_bytes) for stage in range(count - 1)]
    best: tuple[tuple[int, ...], float] | None = None
    tried = set()
    for bound in range(1, num_micro_batches + 1):
        warm_up = warm_up_counts(pass_s, hop_s, num_micro_batches, [bound] * count)
        peaks = [min(ahead + 1, num_micro_batches) for ahead in warm_up]
        if any(peak > limit for peak, limit in zip(peaks, max_in_flight, strict=True)):
            break
        if warm_up in tried:
            continue
        tried.add(warm_up)
        run = run_pipeline(overlapped(count, num_micro_batches, warm_up), stage_times, links, message_bytes)
        if best is None or run.step_s < best[1] * (1 - 1e-12):
            best = warm_up, run.step_s
    if best is None:
        raise PlanError(f"{num_micro_batches} micro-batches", hint="give at least 1")
    return best


def _hop_s(links: Mapping[tuple[int, int], SimulatedLink], stage: int, message_bytes: float) -> float:
    """Return the mean seconds of a message to the next stage and back."""
    pair = [links[ends] for ends in ((stage, stage + 1), (stage + 1, stage)) if ends in links]
    return sum(link.delay_s + message_bytes / link.bytes_per_s for link in pair) / 2
