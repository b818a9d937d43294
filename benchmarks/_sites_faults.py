"""Seeded faults on a real scheduler: what was lost, doubled, half started or left, and the longest hold."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable

from benchmarks._sites_amount import Amount
from benchmarks.table import Row
from tests.agent.faulty_holds import FaultyHolds


def fault_rows(where: str, wanted: int, amount: Amount, run: Callable[[int], FaultyHolds]) -> list[Row]:
    """Make runs by seeds until there were `wanted` faults, or the time is over; `run` makes and returns one."""
    seed, num_faults, longest_s, problems = 0, 0, 0.0, Counter[str]()
    while num_faults < wanted and not amount.is_over:
        done = run(seed)
        problems += done.problems
        num_faults, longest_s = num_faults + done.num_faults, max(longest_s, done.longest_hold_s)
        text = f"seed {seed}: {num_faults} faults, {dict(+done.problems)}, {done.longest_hold_s:.1f} s"
        print(text, file=sys.stderr, flush=True)
        seed += 1
    what = f"{num_faults:,} seeded faults on a real {where}, {seed} runs"
    return [
        Row(what=f"{what}: holds and workers lost, doubled, half started or left", ours=problems.total(),
            unit="cases", target="0", met=not problems.total()),
        Row(what=f"{what}: longest hold after it was given up", ours=longest_s, unit="s", target="at most 60",
            met=longest_s <= 60),
    ]  # fmt: skip
