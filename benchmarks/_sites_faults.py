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
    with amount.seeded_runs(f"faults-{where.replace(' ', '-').lower()}") as runs:
        while sum(one["faults"] for one in runs.results) < wanted and not amount.is_over:
            seed = runs.take()
            done = run(seed)
            problems = +done.problems
            runs.note(
                seed, {"faults": done.num_faults, "problems": dict(problems), "longest_hold_s": done.longest_hold_s}
            )
            text = f"seed {seed}: {done.num_faults} faults, {dict(problems)}, {done.longest_hold_s:.1f} s"
            print(text, file=sys.stderr, flush=True)
            if problems:
                print(f"  its story: {done.steps}", file=sys.stderr, flush=True)
        results, num_open = runs.results, runs.num_open
    num_faults, problems = sum(one["faults"] for one in results), Counter[str]()
    for one in results:
        problems.update(one["problems"])
    longest_s = max((one["longest_hold_s"] for one in results), default=0.0)
    what = f"{num_faults:,} seeded faults on a real {where}, {len(results)} runs"
    what += f", {num_open} cut off" * (num_open > 0)
    return [
        Row(what=f"{what}: holds and workers lost, doubled, half started or left", ours=problems.total(),
            unit="cases", target="0", met=not problems.total()),
        Row(what=f"{what}: longest hold after it was given up", ours=longest_s, unit="s", target="at most 60",
            met=longest_s <= 60),
    ]  # fmt: skip
