"""A month of three owners through the real server and the real agents (`tests/control/owners_month.py`)."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.table import Row
from tests.control.owners_month import SHORT, MonthLoad, OwnersMonth


def rows(seed: int, *, quick: bool) -> list[Row]:
    """Play the month; return what differs, and what happened."""
    memory = Path("/dev/shm")
    load = SHORT if quick else MonthLoad()
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        month, began_s = OwnersMonth(folder=Path(folder), load=load, seed=seed), time.process_time()
        month.run()
        cpu_s = time.process_time() - began_s
    counts = month.counts
    faults = sum(counts[kind] for kind in ("agents killed", "sites cut off", "server killed", "owners' own jobs"))
    what = f"a month of {counts['jobs']:,} jobs at 3 owners, {faults} faults, {counts['prices']} prices"
    return [
        *(
            Row(what=f"{what}: {owner}: statement less what it counted (of {own / 100:,.2f})", ours=float(ours - own),
                unit="cents", target="0", met=ours == own)
            for owner, (ours, own) in month.cents.items()
        ),
        Row(what=f"{what}: other differences", ours=float(len(month.differences)), unit="", target="0",
            met=not month.differences),
        Row(what=f"{what}: entries; parts that owners drove out: {counts['parts evicted']}",
            ours=float(counts["entries"]), unit=""),
        Row(what=f"{what}: server and agents", ours=cpu_s, unit="CPU s"),
    ]  # fmt: skip
