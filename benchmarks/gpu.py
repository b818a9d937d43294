"""How well device messages overlap with computing: `python -m benchmarks.gpu [--json] [--quick]`.

A stage receives a tensor, computes bf16 products, and sends a tensor, micro-batch by micro-batch. It posts the
next receive before a computation, as the overlapped schedule does. The network takes no time, so only the way
between device and host memory remains. Three cases are timed in turns: computing alone, copies alone, and both
at once; the copies use the runtime's staging (pinned memory, separate streams) or the plain way of PyTorch,
`.to()` and `.cpu()`. Overlap is the share of the shorter of the two that adds no time to the longer; 1 is full
overlap. The rows give the median and the extremes of the rounds, and processor seconds beside wall seconds.
Without a CUDA device nothing is measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.table import Row, compared, print_rows
from isthmus.train.communication.communicator import Communicator, CommWork, TensorMessage
from isthmus.train.communication.host_staging import CopyEngine, CudaCopyEngine, HostStaging
from isthmus.train.communication.torch_device import device_name, synchronize

PEER = "PyTorch: `.to()`, `.cpu()`"
MICRO_BATCHES = 32
SIZES_MIB = (2, 16, 64)
RATIOS = (1.0, 4.0)
"""Seconds of computing for a second of copies."""


class Arrived:
    """An exchange that took no time."""

    def is_completed(self) -> bool:
        """Tell that it is over."""
        return True

    def wait(self) -> bool:
        """Return at once."""
        return True


class NoNetwork(Communicator):
    """An exchange whose messages are where they should be at once."""

    def start_message(self, message: TensorMessage) -> Arrived:
        """Take `message`, which is in host memory."""
        del message
        return Arrived()


class Stage:
    """A stage whose messages have `num_bytes`; a micro-batch is `products` of [side, side] matrices."""

    def __init__(self, device: torch.device, copies: CopyEngine, num_bytes: int, side: int, micro_batches: int) -> None:
        self.device, self.micro_batches, self.products = device, micro_batches, 1
        self._exchange = NoNetwork("ab", 0, staging=HostStaging(copies))
        self._left = torch.randn(side, side, dtype=torch.bfloat16, device=device)
        self._product = torch.empty_like(self._left)
        self._rooms = [torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device) for _ in range(2)]
        self._result = torch.zeros_like(self._rooms[0])
        self._host = torch.zeros(num_bytes // 2, dtype=torch.bfloat16)

    def compute(self) -> None:
        """Compute one micro-batch to its end."""
        for _ in range(self.products):
            torch.mm(self._left, self._left, out=self._product)
        synchronize(self.device)

    def computing_alone(self) -> None:
        """Compute a step."""
        for _ in range(self.micro_batches):
            self.compute()

    def copies_alone(self) -> None:
        """Receive and send what a step does."""
        self._staged(lambda: None)

    def both(self) -> None:
        """Run a step as the runtime does."""
        self._staged(self.compute)

    def plain(self) -> None:
        """Run a step that waits for each copy."""
        self._plain(self.compute)

    def plain_copies(self) -> None:
        """Copy what a step does, one after the other."""
        self._plain(lambda: None)

    def _plain(self, compute: Callable[[], None]) -> None:
        for _ in range(self.micro_batches):
            self._host.to(self.device)
            compute()
            self._result.cpu()

    def _staged(self, compute: Callable[[], None]) -> None:
        sends: list[CommWork] = []
        coming = self._receive(0)
        for number in range(self.micro_batches):
            here, coming = coming, self._receive(number + 1)
            for work in here:
                self._exchange.wait(work)
            compute()
            sends += self._exchange.start([TensorMessage(self._result, 1, 2 * number, True)])
        for work in sends:
            self._exchange.wait(work)

    def _receive(self, number: int) -> Sequence[CommWork]:
        if number == self.micro_batches:
            return ()
        return self._exchange.start([TensorMessage(self._rooms[number % 2], 1, 2 * number + 1, False)])


@dataclass
class Taken:
    """Seconds of one way, a value per round: of the wall and of the processor."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def add(self, way: Callable[[], None]) -> None:
        """Time one step."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        way()
        self.wall_s.append(time.perf_counter() - wall_s)
        self.cpu_s.append(time.process_time() - cpu_s)


def balance(stage: Stage, ratio: float) -> None:
    """Let `stage` compute about `ratio` times as long as its copies take."""
    products, copies = Taken(), Taken()
    for taken, way in ((copies, stage.copies_alone), (products, stage.computing_alone)):
        for _ in range(3):
            taken.add(way)
    one_s = min(products.wall_s) / stage.products
    stage.products = max(round(ratio * min(copies.wall_s) / one_s), 1)


def measure(stage: Stage, rounds: int) -> dict[str, Taken]:
    """Return what each way takes, in turns, after one that warms up."""
    ways = {
        "computing": stage.computing_alone,
        "copies": stage.copies_alone,
        "both": stage.both,
        "plain copies": stage.plain_copies,
        "plain": stage.plain,
    }
    found = {name: Taken() for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            (found[name] if number else Taken()).add(way)
    return found


def overlaps(computing: Taken, copies: Taken, both: Taken) -> list[float]:
    """Return the overlap of each round."""
    times = zip(computing.wall_s, copies.wall_s, both.wall_s, strict=True)
    return [(a + b - together) / min(a, b) for a, b, together in times]


def rows(found: dict[str, Taken], what: str, gigabytes: float) -> Iterator[Row]:
    """Yield the table of one stage, whose steps move `gigabytes` in all."""
    for name, peer in (("copies", "plain copies"), ("both", "plain")):
        for kind, unit in (("wall_s", "ms"), ("cpu_s", "ms of CPU")):
            ours, theirs = (getattr(found[one], kind) for one in (name, peer))
            yield compared(
                f"{what}: {'copies alone' if name == 'copies' else 'computing and copies'}",
                statistics.median(ours) * 1e3, unit, PEER, statistics.median(theirs) * 1e3,
                target=f"here {_spread(ours, 1e3)}; there {_spread(theirs, 1e3)}",
            )  # fmt: skip
    alone = found["computing"]
    for kind, unit in (("wall_s", "ms"), ("cpu_s", "ms of CPU")):
        values = getattr(alone, kind)
        value = statistics.median(values) * 1e3
        yield Row(what=f"{what}: computing alone", ours=value, unit=unit, target=_spread(values, 1e3))
    rates, plain_rates = ([gigabytes / one for one in found[k].wall_s] for k in ("copies", "plain copies"))
    yield compared(
        f"{what}: copies alone, both directions", statistics.median(rates), "GB/s", PEER,
        statistics.median(plain_rates), target=f"here {_spread(rates)}; there {_spread(plain_rates)}",
    )  # fmt: skip
    ours = overlaps(alone, found["copies"], found["both"])
    theirs = overlaps(alone, found["plain copies"], found["plain"])
    yield compared(
        f"{what}: overlap", statistics.median(ours), "of the shorter", PEER, statistics.median(theirs),
        target=f"here {_spread(ours)}; there {_spread(theirs)}",
    )  # fmt: skip


def _spread(values: Sequence[float], scale: float = 1.0) -> str:
    """Return the extremes, for people."""
    return f"{min(values) * scale:.3g} to {max(values) * scale:.3g} in {len(values)}"


def run(
    device: torch.device, copies: CopyEngine, sizes: Sequence[int], side: int, rounds: int, micro_batches: int
) -> Iterator[Row]:
    """Measure a stage with messages of each of `sizes` (bytes), with little and with much to compute."""
    for num_bytes in sizes:
        for ratio in RATIOS:
            print(f"{num_bytes / 2**20:g} MiB, {ratio:g} times the copies ...", file=sys.stderr, flush=True)
            stage = Stage(device, copies, num_bytes, side, micro_batches)
            balance(stage, ratio)
            what = f"{micro_batches} x {num_bytes / 2**20:g} MiB, computing for {ratio:g} x the copies"
            yield from rows(measure(stage, rounds), what, 2 * micro_batches * num_bytes / 1e9)


def main() -> None:
    """Measure and print; skip, visibly, where there is no device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="one size, three rounds")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: torch sees no CUDA device here, so nothing was measured", file=sys.stderr)
        return
    device = torch.device("cuda", 0)
    print(f"on {device_name(device)}", file=sys.stderr, flush=True)
    sizes = [mib << 20 for mib in (SIZES_MIB[1:2] if options.quick else SIZES_MIB)]
    rounds = 3 if options.quick else 15
    found = list(run(device, CudaCopyEngine(device), sizes, 4096, rounds, MICRO_BATCHES))
    print_rows(found, options.json)


if __name__ == "__main__":
    main()
