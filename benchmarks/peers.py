"""Our planner beside Sailor and the peers that it ships, judged by Sailor's own simulator.

`python -m benchmarks.peers --sailor FOLDER [--built FOLDER] [--cases N] [--first N] [--metis] [--json]
[--quick]`. FOLDER is a checkout of Sailor called `sailor`; without it nothing is compared. `--built` names the
folder of its planner, built according to its own notes. All planners get Sailor's profiles, its network and
memory, the same chips and the same batch. The simulator judges the first 32 plans of every planner, and the best
counts. Each random case is printed on standard error; `--first` resumes a run that ended early at any case.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks._peer_bench import Bench
from benchmarks._random_cases import A100, V100, ZONES, random_cases, random_rows
from benchmarks._sailor import Case, Sailor
from benchmarks._sailor_peers import Peers
from benchmarks.table import Row, compared, print_rows

TRACES: tuple[tuple[int, int, int | None], ...] = (
    (16, 16, None), (32, 32, None), (32, 96, 13), (80, 240, 11), (128, 384, 8),
)  # fmt: skip
"""A100 and V100 chips, and for Sailor's three mixed traces the percentage over Sailor to reach."""


def trace_rows(bench: Bench, case: Case, others: Sequence[str], percent: int | None) -> Iterator[Row]:
    """Compare with every peer on one case."""
    ours, sailor, naive = bench.ours(case), bench.theirs(case, case.num_chips), bench.naive(case)
    target = f"Sailor's +{percent} %" if percent else ""
    wanted = sailor.rate * (1 + (percent or 0) / 100)
    yield compared(
        f"iterations a second, {case.name}", ours.rate, "1/s", "Sailor", sailor.rate,
        target=target, met=ours.rate >= wanted * (1 - 1e-9) if percent else None,
    )  # fmt: skip
    judged = {"naive grid": naive, **{name: bench.other(name, case) for name in others}}
    for name, one in judged.items():
        if one.best_s == math.inf:
            yield Row(what=f"iterations a second, {case.name} ({name} gave no plan)", ours=ours.rate, unit="1/s")
            continue
        yield compared(
            f"iterations a second, {case.name}", ours.rate, "1/s", name, one.rate,
            target="at least 99.5 % of it", met=ours.rate >= 0.995 * one.rate,
        )  # fmt: skip
        yield compared(f"planning, {case.name}", ours.effort.cpu_s, "CPU s", name, one.effort.cpu_s)
    yield compared(f"planning, {case.name}", ours.effort.cpu_s, "CPU s", "Sailor", sailor.effort.cpu_s)
    yield compared(
        f"peak memory, {case.name}", ours.effort.peak_bytes / 1e9, "GB", "Sailor",
        sailor.effort.peak_bytes / 1e9,
    )  # fmt: skip
    yield compared(
        f"plans the referee refuses, {case.name}", float(ours.refused), f"of {len(ours.effort.plans or ())}",
        "Sailor", float(sailor.refused),
    )  # fmt: skip


def all_trace_rows(bench: Bench, options: argparse.Namespace) -> Iterator[Row]:
    """Compare on the traces."""
    for a100, v100, percent in TRACES[2:3] if options.quick else TRACES:
        chips = {(A100, ZONES[0]): a100, (V100, ZONES[0]): v100}
        case = Case(f"OPT-350M, {a100} A100 + {v100} V100", "OPT-350", 1024, chips)
        others = ["AMP"] + ["FlashFlex"] * (a100 + v100 <= 64) + ["Metis"] * (options.metis and a100 <= 32)
        yield from trace_rows(bench, case, others, percent)
    if not options.quick:
        chips = {(A100, zone): 32 for zone in ZONES}
        case = Case("OPT-350M, 5 zones of 32 A100", "OPT-350", 1024, chips)
        yield from trace_rows(bench, case, ["DTFM"], None)


def rows_of(bench: Bench, options: argparse.Namespace) -> Iterator[Row]:
    """Yield all rows."""
    if not options.first:
        yield from all_trace_rows(bench, options)
    count = min(options.cases, 10) if options.quick else options.cases
    if count:
        yield from random_rows(bench, list(random_cases(options.first, count)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sailor", type=Path, help="a checkout of Sailor")
    parser.add_argument("--built", type=Path, help="where its compiled planner lies (default: in the checkout)")
    parser.add_argument("--cases", type=int, default=200, help="random cases to compare on")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them; above 0: no traces")
    parser.add_argument("--metis", action="store_true", help="ask Metis too: 300 s a case")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="one trace and ten random cases")
    options = parser.parse_args()
    if options.sailor is None:
        print("no checkout of Sailor (--sailor FOLDER): nothing to compare with", file=sys.stderr)
        return
    sailor = Sailor(options.sailor.resolve())
    built = options.built or sailor.root / "Planner/sailor_planner/cpp_src"
    rows = rows_of(Bench(sailor, Peers(sailor, built.resolve())), options)
    if options.json:
        for row in rows:
            print_rows([row], as_json=True)
    else:
        print_rows(list(rows), as_json=False)


if __name__ == "__main__":
    main()
