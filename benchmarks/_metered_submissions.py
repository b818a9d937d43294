"""Submissions of a CPU second through the server's service and coordinator, with the meter and without it, by turns.

The log is kept in memory: a store on a disk would only make the meter's part smaller.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from unittest.mock import patch

from benchmarks.control_store import BULK, submission
from benchmarks.table import Row, compared
from isthmus.control.accounting.meter import Meter
from isthmus.control.coordinator import coordinator as coordinator_module
from isthmus.control.service.coordinator_actor import CoordinatorActor
from isthmus.control.service.submissions import Submissions
from isthmus.control.store.store_interface import MemoryStore

MIN_RATIO = 0.97
"""The meter's share of a CPU is at most 3 %."""


def submission_rows(num_single: int, num_bulk: int, rounds: int) -> Iterator[Row]:
    """Yield the median rates, and the median of the pairs' ratios, which other load on the machine moves less."""
    for size, num in ((1, num_single), (BULK, num_bulk)):
        rates: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(rounds):
            for metered in (True, False) if turn % 2 else (False, True):
                rates[metered].append(_rate(num, size, metered=metered))
        ratios = [one / other for one, other in zip(rates[True], rates[False], strict=True)]
        what, ratio = f"submissions, {size} a request", statistics.median(ratios)
        with_meter, without = (statistics.median(rates[metered]) for metered in (True, False))
        yield compared(what, with_meter, "per CPU s", "without the meter", without)
        yield Row(
            what=f"{what}: with the meter over without, the median of {rounds} pairs of rounds "
            f"({min(ratios):.2f} to {max(ratios):.2f})",
            ours=ratio, unit="", target=f"at least {MIN_RATIO:g}", met=ratio >= MIN_RATIO,
        )  # fmt: skip


def _rate(num: int, size: int, *, metered: bool) -> float:
    """Return how many of `num` submissions, `size` a request, a CPU second takes."""
    jobs = [submission(f"j{number}") for number in range(num)]
    with ExitStack() as stack:
        if not metered:
            stack.enter_context(patch.object(coordinator_module, "meter_jobs", lambda _state, _event: None))
            stack.enter_context(patch.object(Meter, "advance", lambda _meter, _now_s: None))
        accepted = Submissions(CoordinatorActor(MemoryStore(), lambda _: None), None, time.time)
        gc.collect()
        begun_s = time.process_time()
        for begin in range(0, num, size):
            accepted.submit_all("ann", jobs[begin : begin + size])
        used_s = time.process_time() - begun_s
    return num / used_s
