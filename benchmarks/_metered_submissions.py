"""Submissions of a CPU second by the path that a server takes into SQLite, with the meter and without it, by turns."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

from benchmarks.control_store import BULK, submission
from benchmarks.table import Row, compared
from isthmus.control.accounting.meter import Meter
from isthmus.control.coordinator import coordinator as coordinator_module
from isthmus.control.service.coordinator_actor import CoordinatorActor
from isthmus.control.service.submissions import Submissions
from isthmus.control.store.sqlite_store import SqliteStore

MIN_RATIO = 0.97
"""The meter's share of a CPU is at most 3 %."""


def submission_rows(num_single: int, num_bulk: int, rounds: int) -> Iterator[Row]:
    """Yield the median rate with the meter beside that without; the median of the pairs' ratios is judged."""
    for size, num in ((1, num_single), (BULK, num_bulk)):
        rates: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(rounds):
            for metered in (True, False) if turn % 2 else (False, True):
                rates[metered].append(_rate(num, size, metered=metered))
        ratios = [one / other for one, other in zip(rates[True], rates[False], strict=True)]
        what = f"submissions, {size} a request ({rounds} pairs: {min(ratios):.2f} to {max(ratios):.2f})"
        yield compared(
            what, statistics.median(rates[True]), "per CPU s", "without the meter", statistics.median(rates[False]),
            target=f"pairs: at least {MIN_RATIO:g}", met=statistics.median(ratios) >= MIN_RATIO,
        )  # fmt: skip


def _rate(num: int, size: int, *, metered: bool) -> float:
    """Return how many of `num` submissions, `size` a request, a CPU second takes."""
    jobs = [submission(f"j{number}") for number in range(num)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if not metered:
            stack.enter_context(patch.object(coordinator_module, "meter_jobs", lambda _state, _event: None))
            stack.enter_context(patch.object(Meter, "advance", lambda _meter, _now_s: None))
        store = SqliteStore(Path(folder) / "isthmus.db")
        accepted = Submissions(CoordinatorActor(store, lambda _: None), None, time.time)
        gc.collect()
        begun_s = time.process_time()
        for begin in range(0, num, size):
            accepted.submit_all("ann", jobs[begin : begin + size])
        used_s = time.process_time() - begun_s
        store.close()
    return num / used_s
