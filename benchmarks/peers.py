"""Our planner beside Sailor and the peers it ships, judged by Sailor's own simulator.

`python -m benchmarks.peers --sailor FOLDER [--built FOLDER] [--cases N] [--metis] [--json] [--quick]`.
FOLDER is a checkout of Sailor called `sailor`, without which nothing is compared; its planner, built as its
own notes say, lies in `--built`. All get Sailor's profiles, its network
and memory, the same chips and the same batch. Of every planner the first 32 plans are judged and the best
counts.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._naive_grid import grid_plans
from benchmarks._sailor import Case, Sailor
from benchmarks._sailor_peers import Effort, Peers, Plans, measured
from benchmarks._sailor_space import search
from benchmarks.table import Row, compared, print_rows

A100, V100, GH200 = "A100-40", "V100-16", "GH-96"
ZONE = "us-central1-a"
ZONES = (ZONE, "us-central1-b", "us-central1-c", "us-central1-f", "us-west1-b")
FINALISTS = 32
LIMIT_S = 330.0
"""CPU seconds a planner may take: Metis stops by itself after 300."""

FAMILY = 20
"""Random cases that share what Sailor makes its tables for."""

TRACES: tuple[tuple[int, int, int | None], ...] = (
    (16, 16, None), (32, 32, None), (32, 96, 13), (80, 240, 11), (128, 384, 8),
)  # fmt: skip
"""A100 and V100 chips, and for Sailor's three mixed traces the percentage over Sailor to reach."""


@dataclass(frozen=True)
class Judged:
    """The best of a planner's plans by the referee (infinite: none), how many it refused, and their cost."""

    best_s: float
    refused: int
    effort: Effort

    @property
    def rate(self) -> float:
        """Iterations a second."""
        return 1 / self.best_s


@dataclass
class Bench:
    """A checkout of Sailor and the planners that it ships, asked one case after another."""

    sailor: Sailor
    peers: Peers
    _planners: dict[Any, Any] = field(default_factory=dict)

    def judge(self, case: Case, effort: Effort) -> Judged:
        """Return the referee's view of a planner's plans."""
        referee = self.sailor.referee(case)
        times = [referee.iteration_s(plan) for plan in effort.plans or ()]
        return Judged(min(times, default=math.inf), times.count(math.inf), effort)

    def ours(self, case: Case) -> Judged:
        """Plan with our search at Sailor's costs."""
        tables, training = self.sailor.tables(case.model), self.sailor.training(case.model, case.samples)

        def plan() -> Plans:
            return [one.as_dict() for one in search(case, tables, training, FINALISTS)]

        return self.judge(case, measured(plan, LIMIT_S, FINALISTS))

    def naive(self, case: Case) -> Judged:
        """Plan by the naive grid."""
        tables, referee = self.sailor.tables(case.model), self.sailor.referee(case)
        return self.judge(case, measured(lambda: grid_plans(case, tables, referee), LIMIT_S, FINALISTS))

    def theirs(self, case: Case, most_chips: int) -> Judged:
        """Plan with Sailor; its tables are made once for cases that differ in numbers of chips only."""
        key = (case.model, case.samples, case.kinds, case.zones)
        if key not in self._planners:
            self._planners = {key: self.peers.planner(case, most_chips)}
        planner = self._planners[key]
        return self.judge(case, measured(lambda: self.peers.sailor_plans(case, planner), LIMIT_S, FINALISTS))

    def other(self, name: str, case: Case) -> Judged:
        """Plan with one of the other peers."""
        return self.judge(case, measured(lambda: self.peers.other_plans(name, case), LIMIT_S, FINALISTS))


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
            yield Row(
                what=f"iterations a second, {case.name} ({name} gave no plan)", ours=ours.rate, unit="1/s"
            )
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


def random_cases(count: int) -> Iterator[Case]:
    """Yield seeded random cases: model, batch, kinds of chips and zones vary by family, numbers by case."""
    chance = random.Random(7)
    for number in range(count):
        if number % FAMILY == 0:
            model = chance.choice(("OPT-350", "GPT-Neo-2.7"))
            samples = chance.choice((256, 512, 1024, 2048))
            kinds = chance.choice(
                ((A100, V100), (A100, V100), (A100, GH200), (V100, GH200), (A100,), (V100,))
            )
            zones = chance.sample(ZONES, chance.choice((1, 1, 2, 3)))
        most = 64 // (len(kinds) * len(zones))
        chips = {(kind, zone): 4 * chance.randint(1, most // 2) for kind in kinds for zone in zones}
        yield Case(f"random {number}", model, samples, chips)


def random_rows(bench: Bench, count: int) -> list[Row]:
    """Compare on random cases with the best of Sailor, the naive grid, and AMP where it can be asked."""
    ratios: list[float] = []
    by_peer: dict[str, list[float]] = {}
    missed = alone = 0
    for case in random_cases(count):
        ours = bench.ours(case)
        judged = {"Sailor": bench.theirs(case, 256), "naive grid": bench.naive(case)}
        if len(case.zones) == 1:
            judged["AMP"] = bench.other("AMP", case)
        best_s = min(one.best_s for one in judged.values())
        if best_s == math.inf:
            alone += ours.best_s < math.inf
            continue
        missed += ours.best_s == math.inf
        ratios.append(best_s / ours.best_s)
        for name, one in judged.items():
            by_peer.setdefault(name, []).append(one.best_s / ours.best_s)
        print(case, {n: round(one.best_s / ours.best_s, 4) for n, one in judged.items()}, file=sys.stderr)
    worst = min(ratios, default=1.0)
    rows = [
        Row(
            what=f"iterations a second over the best peer's, worst of {count} random cases", ours=worst,
            unit="", target="at least 0.995", met=worst >= 0.995,
        ),
        Row(
            what="of them below 0.995", ours=float(sum(one < 0.995 for one in ratios)), unit="",
            target="0", met=worst >= 0.995,
        ),
        Row(what="with a plan of a peer's and none of ours", ours=float(missed), unit="", target="0",
            met=missed == 0),
        Row(what="with a plan of ours and none of a peer's", ours=float(alone), unit=""),
    ]  # fmt: skip
    for name, each in by_peer.items():
        finite = [one for one in each if one < math.inf]
        what = f"over {name}, median of {len(each)} random cases ({len(each) - len(finite)} without its plan)"
        if finite:
            rows.append(Row(what=what, ours=statistics.median(finite), unit=""))
    return rows


def rows_of(bench: Bench, options: argparse.Namespace) -> Iterator[Row]:
    """Yield all rows."""
    for a100, v100, percent in TRACES[2:3] if options.quick else TRACES:
        chips = {(A100, ZONE): a100, (V100, ZONE): v100}
        case = Case(f"OPT-350M, {a100} A100 + {v100} V100", "OPT-350", 1024, chips)
        others = ["AMP"] + ["FlashFlex"] * (a100 + v100 <= 64) + ["Metis"] * (options.metis and a100 <= 32)
        yield from trace_rows(bench, case, others, percent)
    if not options.quick:
        chips = {(A100, zone): 32 for zone in ZONES}
        case = Case("OPT-350M, 5 zones of 32 A100", "OPT-350", 1024, chips)
        yield from trace_rows(bench, case, ["DTFM"], None)
    if options.cases:
        yield from random_rows(bench, min(options.cases, 10) if options.quick else options.cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sailor", type=Path, help="a checkout of Sailor")
    parser.add_argument(
        "--built", type=Path, help="where its compiled planner lies (default: in the checkout)"
    )
    parser.add_argument("--cases", type=int, default=200, help="random cases to compare on")
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
