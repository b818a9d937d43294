"""Messages between clusters in a job's timeline, beside the record of the links that carried them.

`python -m benchmarks._first_hour_timeline [--quick] [--json]` runs virtual stages as real workers in three clusters on
emulated links, under the overlapped schedule. The emulator records when each link took and delivered every byte; the
frames in those bytes name their messages. The error of a bar of the timeline is the larger of the differences of its
start and of its end from that record.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import signal
import statistics
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import accumulate
from pathlib import Path

from benchmarks._virtual_run import OVERRUN_SHARE, run_workers
from benchmarks.table import Row, print_rows
from isthmus.cli.job_report.stage_trace import WanTransfer, on_one_clock, wan_transfers
from isthmus.comm.channel.channel import PlainChannel
from isthmus.comm.tcp.wire_format import DATA, FrameHeader, read_header
from isthmus.core.messages.agent_messages import StepMetrics
from isthmus.core.plan import Plan, StageTime
from isthmus.core.pool import Pool
from isthmus.core.process.steady_clock import ANCHOR_S
from isthmus.wan.emulator import ROUTES_FILE, run_links
from isthmus.wan.link_direction import DeliveredChunk
from isthmus.wan.tcp_relay import ClusterPair

TARGET_MS = 1.0
CLUSTERS = ("west", "middle", "east")
TIME = StageTime(forward_s=0.02, backward_s=0.04)
MICRO_BATCHES = 8
DELAYS_MS, GBPS = (4, 10), 0.2
WARM_UP = (5, 3, 1)
ATTEMPTS = 3
"""How often the schedule is run at most until a step is calm."""
_PATIENCE_S = 60.0
_GREETING_BYTES = 4 * 16
"""What follows the line of a greeting: the times of the pings; the dialler adds the offset (16 bytes)."""


@dataclass(frozen=True, kw_only=True)
class CarriedMessage:
    """A message as the links saw it: the sender's time stamp, first byte taken, last byte delivered (epoch seconds)."""

    ends: ClusterPair
    sent_s: float
    departed_s: float
    delivered_s: float


@dataclass(frozen=True)
class Comparison:
    """Errors of the bars of the steps that count, in ms; how many messages no bar showed; how many bars lasted 0 ms.

    `num_calm` of `num_steps` steps were calm; without one all count.
    """

    errors_ms: tuple[float, ...]
    num_missing: int
    num_empty: int
    num_calm: int = 0
    num_steps: int = 0

    @property
    def largest_ms(self) -> float:
        """The largest error."""
        return max(self.errors_ms)

    @property
    def mean_ms(self) -> float:
        """The mean error."""
        return statistics.fmean(self.errors_ms)


def compare_timeline(steps: int, *, jitter_ms: float = 0.0) -> Comparison:
    """Run `steps` steps of the known schedule; compare every bar of the calm ones but the first with the links' record.

    A step is calm unless other work kept the machine busy, as in `benchmarks._virtual_run`; all count if none is.
    """
    pool, plan = _pool(jitter_ms), _plan()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "config.json"
        sizes = {"num_hidden_layers": len(CLUSTERS), "hidden_size": 384, "vocab_size": 1000}
        model.write_text(json.dumps({"architectures": ["MixtralForCausalLM"], **sizes}), encoding="utf-8")
        with _recording_links(pool, folder / "links") as routes:
            ranks = run_workers(plan, [TIME] * 3, model, folder, routes, steps, range(1, steps), is_prompt=True)
        carried = list(carried_messages(_read_record(folder / "links")))
    by_step = [[rank[step] for rank in ranks] for step in range(1, steps)]
    calm = [metrics for metrics in by_step if _is_calm(metrics)]
    found = compare([bars_of(metrics, plan) for metrics in calm or by_step], carried, plan)
    return replace(found, num_calm=len(calm), num_steps=len(by_step))


def _is_calm(metrics: Sequence[StepMetrics]) -> bool:
    """Return whether no stage's waiting, in place of computing, took much too long in a step: the machine kept up."""
    planned_s = MICRO_BATCHES * (TIME.forward_s + TIME.backward_s) + TIME.update_s
    return all(
        (one.values["compute_s"] or 0.0) - planned_s <= OVERRUN_SHARE * (one.values["step_s"] or 0.0) for one in metrics
    )


def bars_of(metrics: Sequence[StepMetrics], plan: Plan) -> list[WanTransfer]:
    """Return the messages of one step as the report draws them."""
    return wan_transfers(on_one_clock(metrics, plan), plan)


def compare(steps: Sequence[Sequence[WanTransfer]], carried: Sequence[CarriedMessage], plan: Plan) -> Comparison:
    """Compare the bars of steps with what the links carried in them; a bar without a message counts as infinite."""
    errors, shown, num_missing, bars = list[float](), set[CarriedMessage](), 0, [bar for step in steps for bar in step]
    for bar in bars:
        ends = plan.stage_of(bar.source).cluster, plan.stage_of(bar.target).cluster
        near = [one for one in carried if one.ends == ends and one not in shown]
        best = min(near, key=lambda one: abs(one.sent_s - bar.sent_s), default=None)
        if best is None:
            errors.append(float("inf"))
            continue
        shown.add(best)
        errors.append(1e3 * max(abs(bar.start_s - best.departed_s), abs(bar.end_s - best.delivered_s)))
    for step in steps:
        begin_s, end_s = min(bar.start_s for bar in step), max(bar.end_s for bar in step)
        inside = (one for one in carried if begin_s <= one.departed_s and one.delivered_s <= end_s)
        num_missing += sum(one not in shown for one in inside)
    return Comparison(tuple(errors), num_missing, sum(bar.end_s - bar.start_s < 1e-4 for bar in bars))


def carried_messages(record: dict[ClusterPair, list[DeliveredChunk]]) -> Iterator[CarriedMessage]:
    """Yield the messages of at least 1 KiB in a record of delivered bytes; each cluster has one rank."""
    for ends, chunks in record.items():
        fragments: dict[int, list[_CarriedFragment]] = {}
        for stream in {one.stream for one in chunks}:
            for one in _fragments_of_stream([chunk for chunk in chunks if chunk.stream == stream]):
                fragments.setdefault(one.header.number, []).append(one)
        for found in fragments.values():
            if sum(one.header.payload_bytes for one in found) == found[0].header.message_bytes:
                yield CarriedMessage(
                    ends=ends,
                    sent_s=found[0].header.sent_s,
                    departed_s=ANCHOR_S + min(one.departed_s for one in found),
                    delivered_s=ANCHOR_S + max(one.delivered_s for one in found),
                )


@dataclass(frozen=True)
class _CarriedFragment:
    header: FrameHeader
    departed_s: float
    delivered_s: float


def _fragments_of_stream(chunks: Sequence[DeliveredChunk]) -> Iterator[_CarriedFragment]:
    """Read the frames of one connection, with the clock of the event loop."""
    data, last = b"".join(one.data for one in chunks), list(accumulate(len(one.data) for one in chunks))
    greeting, _, _ = data.partition(b"\n")
    if not greeting.startswith(b"{"):  # not a connection between workers
        return
    at = len(greeting) + 1 + _GREETING_BYTES + (0 if b'"refused"' in greeting else 16)
    for header, begin, end in _frames(data, at):
        if header.kind == DATA and header.message_bytes >= 1024:
            first, final = chunks[bisect_right(last, begin)], chunks[bisect_right(last, end - 1)]
            yield _CarriedFragment(header, first.read_s, final.delivered_s)


class _Bytes(BytesIO):
    """Bytes that read like a socket."""

    def recv_into(self, buffer: memoryview) -> int:
        return self.readinto(buffer)


def _frames(data: bytes, at: int) -> Iterator[tuple[FrameHeader, int, int]]:
    """Yield the complete frames from byte `at` on: header, first byte, and the byte after the last one."""
    source = _Bytes(data)
    source.seek(at)
    while True:
        begin = source.tell()
        try:
            header = read_header(PlainChannel(source))  # type: ignore[arg-type]
        except ConnectionResetError:
            return
        end = source.tell() + header.payload_bytes
        if end > len(data):
            return
        source.seek(end)
        yield header, begin, end


@contextmanager
def _recording_links(pool: Pool, folder: Path) -> Iterator[dict[str, dict[str, str]]]:
    """Emulate the links of `pool` in a process that writes its record to `folder` when it ends."""
    process = multiprocessing.get_context("spawn").Process(target=_record_links, args=(pool, folder))
    process.start()
    try:
        end_s = time.monotonic() + _PATIENCE_S
        while not (folder / ROUTES_FILE).exists():
            if time.monotonic() > end_s or not process.is_alive():
                raise TimeoutError("the emulated links did not start")
            time.sleep(0.02)
        yield json.loads((folder / ROUTES_FILE).read_text(encoding="utf-8"))
        os.kill(process.pid or 0, signal.SIGTERM)
        process.join(_PATIENCE_S)
    finally:
        process.kill()
        process.join()


def _record_links(pool: Pool, folder: Path) -> None:
    found: dict[ClusterPair, list[DeliveredChunk]] = {}
    run_links(pool, folder, record=lambda ends, chunk: found.setdefault(ends, []).append(chunk))
    (folder / "record").write_bytes(pickle.dumps(found))


def _read_record(folder: Path) -> dict[ClusterPair, list[DeliveredChunk]]:
    record: dict[ClusterPair, list[DeliveredChunk]] = pickle.loads((folder / "record").read_bytes())
    return record


def _pool(jitter_ms: float) -> Pool:
    group = {"chip": "H20", "nodes": 1, "chips_per_node": 1}
    links = [
        {"between": list(ends), "bandwidth_gbps": GBPS, "round_trip_ms": 2 * delay_ms, "jitter_ms": jitter_ms}
        for ends, delay_ms in zip((CLUSTERS[:2], CLUSTERS[1:]), DELAYS_MS, strict=True)
    ]
    links.append({"between": [CLUSTERS[0], CLUSTERS[2]], "bandwidth_gbps": GBPS, "round_trip_ms": 28})
    clusters = [{"name": one, "owner": one, "node_groups": [group]} for one in CLUSTERS]
    return Pool.model_validate({"clusters": clusters, "links": links})


def _plan() -> Plan:
    return Plan.model_validate(
        {
            "id": "known",
            "stages": [
                {"cluster": cluster, "node_group": "h20", "layers": (place, place + 1)}
                for place, cluster in enumerate(CLUSTERS)
            ],
            "micro_batches": MICRO_BATCHES,
            "micro_batch_size": 1,
            "sequence_length": 512,
            "schedule": "overlapped",
            "warm_up": WARM_UP,
            "compute": "virtual",
        }
    )


def rows(found: Comparison) -> list[Row]:
    """Return the rows of the benchmark."""
    calm = f"{found.num_calm} of {found.num_steps} steps undisturbed"
    what = f"messages between clusters, {len(found.errors_ms)} bars beside the links' record, {calm}"
    target = f"at most {TARGET_MS:g} ms"
    lost = found.num_empty + found.num_missing
    return [
        Row(what=f"{what}: largest error", ours=found.largest_ms, unit="ms", target=target,
            met=found.largest_ms <= TARGET_MS),
        Row(what=f"{what}: mean error", ours=found.mean_ms, unit="ms", target=target, met=found.mean_ms <= TARGET_MS),
        Row(what=f"{what}: bars of 0 ms and messages without a bar", ours=lost, unit="", target="0", met=lost == 0),
    ]  # fmt: skip


def main() -> int:
    """Run and print the errors; exit with 1 where the largest is above the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two steps that count instead of eight")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    for _ in range(ATTEMPTS):
        found = compare_timeline(3 if arguments.quick else 9)
        if found.num_calm:
            break
    print_rows(rows(found), arguments.json)
    return 0 if found.largest_ms <= TARGET_MS else 1


if __name__ == "__main__":
    sys.exit(main())
