"""One look of an agent at its scheduler, in turn with a bare question to it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import psutil

from benchmarks.table import Row, compared

LOOKS, PAUSE_S, MOST_MS = 30, 0.3, 100


def look_rows(
    what: str,
    peer: str,
    look: Callable[[], object],
    bare: Callable[[], object],
    num_asked: Callable[[], int],
    *,
    asked: str,
    apart: str,
) -> list[Row]:
    """Return the rows of `LOOKS` looks, each followed by a bare question: time, CPU, and what was `asked` per look.

    `num_asked` counts what was asked so far; `apart` says what is asked now and then only.
    """  # fmt: skip
    looks, bares, cpu, bare_cpu = [], [], [], []
    begin = num_asked()
    for _ in range(LOOKS):
        for action, times, cpus in ((look, looks, cpu), (bare, bares, bare_cpu)):
            took_s, cpu_s = _measured(action)
            times.append(1e3 * took_s)
            cpus.append(1e3 * cpu_s)
            time.sleep(PAUSE_S)
    num = (num_asked() - begin) / LOOKS
    took_ms = statistics.median(looks)
    return [
        compared(f"{what}, p50", took_ms, "ms", peer, statistics.median(bares), target=f"at most {MOST_MS}",
                 met=took_ms <= MOST_MS),
        Row(what=f"{what}: {asked}, with {apart}", ours=num, unit=asked, target="one, those apart", met=num < 1.5),
        compared(f"{what}, p50", statistics.median(cpu), "CPU ms", peer, statistics.median(bare_cpu)),
    ]  # fmt: skip


def _measured(action: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of `action`, and the CPU seconds of this process and its children."""
    before, begun_s = psutil.Process().cpu_times(), time.perf_counter()
    action()
    took_s, after = time.perf_counter() - begun_s, psutil.Process().cpu_times()
    fields = ("user", "system", "children_user", "children_system")
    return took_s, sum(getattr(after, field) - getattr(before, field) for field in fields)
