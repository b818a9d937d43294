"""What it costs a rank to belong to a run: `python -m benchmarks.neighbours [--json] [--quick] [--ranks N ...]`.

N ranks (64, 128 and 512 by turns) in 16 processes of this machine, each with a transport of its own over loopback and
heartbeats as in a job, meet and send a message to the next rank, so that each communicates with two. Printed are the
time of the meeting from the moment when every process knows the addresses, the time of that message, and then, while
nothing is sent, threads and CPU per rank. The same for 32 ranks in one process, beside a transport in which every rank
dials every other. Each number of ranks has a table of its own, so that `--ranks 512` leaves the others as they are.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks._meeting_ranks import LIMIT_S, IdleRanks, run_ranks
from benchmarks.table import Row, compared, print_rows

NUM_PROCESSES = 16
OTHER_THREADS, MAX_IDLE_MS, MAX_MEETING_S = 16, 1.0, 10.0


def measure_run(size: int, num_processes: int, idle_s: float, *, every: bool) -> tuple[float, list[IdleRanks]]:
    """Return the seconds of the meeting of `size` ranks, and what each process measured."""
    context = multiprocessing.get_context("spawn")
    lines, processes = [], []
    for place in range(num_processes):
        ranks = range(size * place // num_processes, size * (place + 1) // num_processes)
        near, far = context.Pipe()
        processes.append(context.Process(target=run_ranks, args=(ranks, size, idle_s, every, far), daemon=True))
        processes[-1].start()
        lines.append(near)

    def from_all() -> list[object]:
        for one in lines:
            if not one.poll(LIMIT_S):
                raise TimeoutError(f"a process of {size} ranks is silent for {LIMIT_S:g} s")
        return [one.recv() for one in lines]

    try:
        ports = [port for found in from_all() for port in found]  # type: ignore[attr-defined]
        start_s = time.monotonic()
        for step in (ports, None):
            for one in lines:
                one.send(step)
            reports = from_all()
        for one in lines:
            one.send(None)
        for process in processes:
            process.join(LIMIT_S)
    finally:
        for process in processes:
            process.kill()
    idle = [one for one in reports if isinstance(one, IdleRanks)]
    return max(one.met_s for one in idle) - start_s, idle


def rows_of(size: int, num_processes: int, idle_s: float) -> Iterator[Row]:
    """Yield the rows of `size` ranks."""
    what, meeting_s, idle = f"{size} ranks", *measure_run(size, num_processes, idle_s, every=False)
    per_process = size // num_processes
    threads = max(one.num_threads for one in idle) / per_process
    links = sum(one.num_links for one in idle) / size
    yield Row(
        what=f"{what}, threads of a rank ({links:.1f} links; most of any process)", ours=threads, unit="threads",
        target=f"neighbours + {OTHER_THREADS}", met=threads <= links + OTHER_THREADS,
    )  # fmt: skip
    cpu_ms = 1e3 * sum(one.cpu_s for one in idle) / size / idle_s
    yield Row(
        what=f"{what}, idle CPU of a rank", ours=cpu_ms, unit="ms/s",
        target=f"<= {MAX_IDLE_MS:g}", met=cpu_ms <= MAX_IDLE_MS,
    )  # fmt: skip
    yield Row(
        what=f"{what}, meeting", ours=meeting_s, unit="s",
        target=f"<= {MAX_MEETING_S:g}", met=meeting_s <= MAX_MEETING_S,
    )  # fmt: skip
    talked_s = max(one.talked_s for one in idle) - max(one.met_s for one in idle)
    yield Row(what=f"{what}, a message to the next rank over a new link", ours=talked_s, unit="s")


def beside_all_to_all(size: int, idle_s: float) -> Iterator[Row]:
    """Yield the rows of `size` ranks in one process, beside a link between every two of them."""
    meeting_s, [mine] = measure_run(size, 1, idle_s, every=False)
    all_meeting_s, [other] = measure_run(size, 1, idle_s, every=True)
    what, peer = f"{size} ranks in one process", "every rank dials every other"
    yield compared(f"{what}, threads of a rank", mine.num_threads / size, "threads", peer, other.num_threads / size)
    cpu_ms = [1e3 * one.cpu_s / size / idle_s for one in (mine, other)]
    yield compared(f"{what}, idle CPU of a rank", cpu_ms[0], "ms/s", peer, cpu_ms[1])
    yield compared(f"{what}, meeting", meeting_s, "s", peer, all_meeting_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rows; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--quick", action="store_true", help="64 ranks beside 16, for 2 s")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 128, 512], help="numbers of ranks, by turns")
    options = parser.parse_args(arguments)
    sizes, few, num_processes, idle_s = options.ranks, 32, NUM_PROCESSES, 10.0
    if options.quick:
        sizes, few, num_processes, idle_s = [64], 16, 4, 2.0
    parts = {f"{size} ranks": rows_of(size, num_processes, idle_s) for size in sizes}
    parts["in one process"] = beside_all_to_all(few, idle_s)
    rows = [replace(row, part=part) for part, found in parts.items() for row in found]
    print_rows(rows, as_json=options.json)
    return int(any(row.met is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
