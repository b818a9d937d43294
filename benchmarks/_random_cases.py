"""Random cases beside the best peer. Sailor is asked in a process of its own, which its library may end.

Such a case is asked once more; where that is ended, too, the others are compared without Sailor.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TypeVar

from benchmarks._peer_bench import Bench
from benchmarks._sailor import Case
from benchmarks.table import Row

A100, V100, GH200 = "A100-40", "V100-16", "GH-96"
ZONES = ("us-central1-a", "us-central1-b", "us-central1-c", "us-central1-f", "us-west1-b")

FAMILY = 20
"""Random cases that share what Sailor makes its tables for."""

ReplyT = TypeVar("ReplyT")


@dataclass(frozen=True)
class Verdict:
    """The referee's seconds for the best plan of ours and of each peer (infinite: none)."""

    ours_s: float
    peers_s: dict[str, float]

    @property
    def ratios(self) -> dict[str, float]:
        """Our rate over each peer's (infinite: only we have a plan)."""
        return {name: one_s / self.ours_s for name, one_s in self.peers_s.items()}


def random_cases(first: int, count: int) -> Iterator[Case]:
    """Yield `count` seeded random cases, from number `first` on.

    Model, batch, kinds of chips and zones vary by family, numbers of chips by case.
    """
    chance = random.Random(7)
    for number in range(first + count):
        if number % FAMILY == 0:
            model = chance.choice(("OPT-350", "GPT-Neo-2.7"))
            samples = chance.choice((256, 512, 1024, 2048))
            kinds = chance.choice(((A100, V100), (A100, V100), (A100, GH200), (V100, GH200), (A100,), (V100,)))
            zones = chance.sample(ZONES, chance.choice((1, 1, 2, 3)))
        most = 64 // (len(kinds) * len(zones))
        chips = {(kind, zone): 4 * chance.randint(1, most // 2) for kind in kinds for zone in zones}
        if number >= first:
            yield Case(f"random {number}", model, samples, chips)


def judged(bench: Bench, case: Case, sailor_s: float) -> Verdict:
    """Judge ours, the naive grid, and AMP where it can be asked, beside the seconds of Sailor's best plan."""
    peers = {"Sailor": sailor_s, "naive grid": bench.naive(case).best_s}
    if len(case.zones) == 1:
        peers["AMP"] = bench.other("AMP", case).best_s
    return Verdict(bench.ours(case).best_s, peers)


def apart(ask: Callable[[Case], ReplyT], cases: Sequence[Case], tries: int = 2) -> Iterator[tuple[Case, ReplyT | None]]:
    """Yield what `ask` replies to each case in a child process; None where that ended `tries` times.

    A child asks one case after another, and keeps what it has made for them, until it ends.
    """
    fork, left, ended = get_context("fork"), list(cases), 0
    while left:
        reading, writing = fork.Pipe(duplex=False)
        child = fork.Process(target=_serve, args=(ask, left, writing), daemon=True)
        child.start()
        writing.close()
        with contextlib.suppress(EOFError), reading:
            while left:
                reply = reading.recv()
                ended = 0
                yield left.pop(0), reply
        child.join()
        ended += 1
        if left and ended == tries:
            ended = 0
            yield left.pop(0), None


def _serve(ask: Callable[[Case], object], cases: Sequence[Case], replies: Connection) -> None:
    for case in cases:
        replies.send(ask(case))


def random_rows(bench: Bench, cases: Sequence[Case]) -> list[Row]:
    """Compare with the best peer on random cases; our rates over the peers' go to standard error."""
    verdicts: list[Verdict] = []
    ended = 0
    for case, sailor in apart(lambda case: bench.theirs(case, 256), cases):
        ended += sailor is None
        verdicts.append(judged(bench, case, sailor.best_s if sailor else math.inf))
        told = {name: round(one, 4) for name, one in verdicts[-1].ratios.items()}
        print(case.name, case.model, case.samples, dict(case.chips), told, file=sys.stderr)
    asked = [one for one in verdicts if min(one.peers_s.values()) < math.inf]
    alone = [one for one in verdicts if one not in asked and one.ours_s < math.inf]
    ratios = [min(one.ratios.values()) for one in asked]
    worst = min(ratios, default=1.0)
    missed = ratios.count(0.0)
    rows = [
        Row(
            what=f"iterations a second over the best peer's, worst of {len(cases)} random cases", ours=worst,
            unit="", target="at least 0.995", met=worst >= 0.995,
        ),
        Row(
            what="of them below 0.995", ours=float(sum(one < 0.995 for one in ratios)), unit="",
            target="0", met=worst >= 0.995,
        ),
        Row(what="with a plan of a peer's and none of ours", ours=float(missed), unit="", target="0",
            met=missed == 0),
        Row(what="with a plan of ours and none of a peer's", ours=float(len(alone)), unit=""),
        Row(what="in which Sailor's library ended its process, twice", ours=float(ended), unit=""),
    ]  # fmt: skip
    for name in dict.fromkeys(name for one in asked for name in one.peers_s):
        each = [one.ratios[name] for one in asked if name in one.peers_s]
        finite = [one for one in each if one < math.inf]
        what = f"over {name}, median of {len(each)} random cases ({len(each) - len(finite)} without its plan)"
        if finite:
            rows.append(Row(what=what, ours=statistics.median(finite), unit=""))
    return rows
