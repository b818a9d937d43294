"""Weights over thin links, trajectories and decoding: `python -m benchmarks.rl [--json] [--quick] [--only PART]`.

`delta`: 20 million bfloat16 weights of N(0, .02), one step of Adam apart at rates 1e-6 and 1e-5. Bytes for each changed
weight beside other formats in the same run: positions of 4 bytes with whole values, as verl has them; gaps of 16 bits
with whole values, compressed by zstd at level 1 (a row where `zstandard` is installed) or zlib at level 1; and the
entropy of the changes given the old exponents. A rate is bytes of weights by CPU seconds of one thread: of the code
alone, and of `isthmus rl delta` and `apply` with files, SHA-256 of all blocks included. The same for 2 million float32
weights, of which nearly all change, by hundreds of steps of the last bit.

`ledger`: at least 10,000 faults drawn by seeds (`benchmarks/_rollout_faults.py`), for staleness 0, 1 and 4 and each
`on_update`; every invariant is checked after every event, and the ends of all runs by what engines and trainer did.

`trust`: samples of engines that forge (`benchmarks/_rollout_forgers.py`), and the number of the first one that an
audit finds; then 10,000 samples of honest engines, whose arithmetic is not the auditor's, and how many are accused.

`plan`: predicted steps beside 20 runs of the real ledger, token by token on a virtual clock; the chosen roles beside
all, simulated, for 200 random pools; and the advised sequences at once beside a sweep of the engine's own scheduler.

`learn`: sums of two digits with real workers: 300 supervised steps, then 800 of DAPO without refill, 32 prompts of 8
samples; held out: 500 sums, most probable responses. In one process for three seeds; at staleness 1 and 4 a second
process decodes. CPU seconds are those of a whole step, decoding and ledger included; TRL's,
where it is installed, of as many samples with the same loss, on the same model.

`decode`: the paged engine on a Qwen3 of random weights, prompts of 8 tokens, 48 decoded: tokens by CPU seconds beside
`generate` of transformers on the same batch, and how many sequences have other numbers in a batch than alone.

`links`: whole weights to three sites, over the time that one line takes, by the engine of relays; and steps a second
of virtual chips (training 2 s, a token of up to 64 samples in 12 or 18 ms, responses of 32 to 128 tokens, 64 a step) by
the real ledger: both in virtual time, which no load of the machine changes.

`sites`: the same with processes at emulated links (`benchmarks/_weights_links.py`): real connections, weights and
ledger, where one site after another stands for a server that takes one request at a time. The processes share the
machine's CPUs, so on a busy one these figures are its load's.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks._rollout_faults import RolloutWorld
from benchmarks._weight_versions import Bits, adam_versions, entropy_bytes
from benchmarks.table import Row, compared, print_rows, run_parts
from isthmus.rl import LedgerConfig, check_trajectories, summarise_ledger
from isthmus.weights import apply_delta, decode_changes, encode_changes, write_delta
from isthmus.weights.weights_file import BLOCK_BYTES

TARGET_BYTES = 0.95
TARGET_GB_PER_S = 0.5


def cpu_s(work: Callable[[], object], times: int = 3) -> float:
    """Return the least CPU seconds of this process for `work`."""
    found = []
    for _ in range(times):
        start_s = time.process_time()
        work()
        found.append(time.process_time() - start_s)
    return min(found)


def blocks(old: Bits, new: Bits) -> Iterator[tuple[Bits, Bits]]:
    """Yield both versions block by block, as a file is coded."""
    size = BLOCK_BYTES // old.itemsize
    for at in range(0, len(old), size):
        yield old[at : at + size], new[at : at + size]


def delta_rows(quick: bool) -> list[Row]:
    """Return bytes for each changed weight beside peers, and rates."""
    num_weights = 4_000_000 if quick else 20_000_000
    rows = []
    for rate in (1e-6, 1e-5):
        old, new = adam_versions(num_weights, rate)
        rows += _size_rows(old, new, rate)
    wide = adam_versions(num_weights // 10, 1e-6, rounded=False)
    rows += _size_rows(*wide, 1e-6, "float32 ")
    return [*rows, *_rate_rows(*adam_versions(num_weights, 1e-6)), *_code_rows(*wide, "float32 ")]


def _size_rows(old: Bits, new: Bits, rate: float, kind: str = "") -> Iterator[Row]:
    places = np.flatnonzero(old != new)
    num, codes = len(places), [encode_changes(*one) for one in blocks(old, new)]
    for (before, after), code in zip(blocks(old, new), codes, strict=True):
        if not (decode_changes(before, code)[0] == after).all():
            raise ValueError("a decoded version differs")
    ours = sum(map(len, codes)) / num
    what = f"bytes per changed weight, {len(old):,} {kind}weights, {num / len(old):.1%} changed (Adam, rate {rate:g})"
    is_judged = rate == 1e-6 and not kind
    judged = {"target": f"at most {TARGET_BYTES}", "met": ours <= TARGET_BYTES} if is_judged else {}
    yield compared(what, ours, "B", "entropy by exponent", entropy_bytes(old, new) / num, **judged)
    gaps = np.diff(places, prepend=0)
    pieces = np.minimum(gaps, 0xFFFF).astype(np.uint16).tobytes() + new[places].tobytes()
    whole = places.astype(np.int32).nbytes + new[places].nbytes
    peers = {
        "positions of 4 bytes and values (verl)": whole,
        "16-bit gaps and values, zlib-1": len(zlib.compress(pieces, 1)),
    }
    if kind:
        peers["XOR with the old weights, zlib-1"] = len(zlib.compress((old ^ new).tobytes(), 1))
    try:
        import zstandard
    except ImportError:
        print("no zstandard: `pip install zstandard` for its row", file=sys.stderr)
    else:
        peers["16-bit gaps and values, zstd-1"] = len(zstandard.ZstdCompressor(level=1).compress(pieces))
    for name, size in peers.items():
        yield compared(what, ours, "B", name, size / num)


def _code_rows(old: Bits, new: Bits, kind: str = "") -> Iterator[Row]:
    """Yield the rates of the code alone; one is judged for weights of 16 bits."""
    pairs = list(blocks(old, new))
    codes = [encode_changes(*one) for one in pairs]
    coded_s = cpu_s(lambda: [encode_changes(*one) for one in pairs])
    decoded_s = cpu_s(lambda: [decode_changes(one, code) for (one, _), code in zip(pairs, codes, strict=True)])
    yield _rate_row(f"coding: {kind}weights by CPU time", old, new, coded_s, judged=not kind)
    yield _rate_row(f"decoding: {kind}weights by CPU time", old, new, decoded_s)


def _rate_row(what: str, old: Bits, new: Bits, spent_s: float, *, judged: bool = False) -> Row:
    rate, share = old.nbytes / spent_s / 1e9, np.count_nonzero(old != new) / len(old)
    target = {"target": f"at least {TARGET_GB_PER_S}", "met": rate >= TARGET_GB_PER_S} if judged else {}
    return Row(what=f"{what}, {share:.1%} changed", ours=rate, unit="GB/s", **target)


def _rate_rows(old: Bits, new: Bits) -> Iterator[Row]:
    yield from _code_rows(old, new)
    with tempfile.TemporaryDirectory() as folder:
        paths = [write_weights(Path(folder) / name, bits) for name, bits in (("old", old), ("new", new))]
        delta, again = Path(folder) / "delta", Path(folder) / "again"
        written_s = cpu_s(lambda: write_delta(*paths, delta))
        applied_s = cpu_s(lambda: apply_delta(paths[0], delta, again))
        if again.read_bytes() != paths[1].read_bytes():
            raise ValueError("an applied version differs")
    files = "files and SHA-256 included: weights by CPU time"
    yield _rate_row(f"isthmus rl delta, {files}", old, new, written_s)
    yield _rate_row(f"isthmus rl apply, {files}", old, new, applied_s)


def write_weights(path: Path, bits: Bits) -> Path:
    """Write a safetensors file with one tensor of bfloat16."""
    entry = {"dtype": "BF16", "shape": [len(bits)], "data_offsets": [0, bits.nbytes]}
    header = json.dumps({"w": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bits.tobytes())
    return path


def ledger_rows(quick: bool) -> list[Row]:
    """Return what faults lost and doubled, and how stale tokens became."""
    wanted = 900 if quick else 10_000
    faults: Counter[str] = Counter()
    lost = doubled = too_stale = problems = events = seed = 0
    spent_s = 0.0
    while faults.total() < wanted:
        for staleness in (0, 1, 4):
            for on_update in ("keep", "refill", "abort"):
                rules = LedgerConfig(
                    group=2 + seed % 3, batch_prompts=1 + seed % 4, max_staleness=staleness, num_prompts=12,
                    on_update=on_update, filter_groups=seed % 2 == 0,
                )  # fmt: skip
                world = RolloutWorld(rules, seed, 0.15, lambda ledger: check_trajectories(ledger.state))
                start_s = time.process_time()
                world.run()
                spent_s += time.process_time() - start_s
                told = summarise_ledger(world.ledger.state)
                lost, doubled = lost + told.lost, doubled + told.doubled
                too_stale += sum(num for one, num in told.staleness.items() if one > staleness)
                problems += len(world.problems())
                events, faults = events + len(world.log), faults + world.faults
        seed += 1
    what = f"{faults.total():,} seeded faults of {len(faults)} kinds, {events:,} events"
    return [
        Row(what=f"{what}: prompts lost", ours=lost, unit="prompts", target="0", met=lost == 0),
        Row(what=f"{what}: prompts doubled", ours=doubled, unit="prompts", target="0", met=doubled == 0),
        Row(what=f"{what}: tokens beyond their staleness", ours=too_stale, unit="tokens", target="0",
            met=too_stale == 0),
        Row(what=f"{what}: differences from what engines and trainer did", ours=problems, unit="", target="0",
            met=problems == 0),
        Row(what=f"{what}: events handled and checked, faults and engines included", ours=events / spent_s,
            unit="1/CPU-s"),
    ]  # fmt: skip


def trust_rows(quick: bool) -> list[Row]:
    """Return after how many samples forgers are found, and how many honest samples are accused."""
    from benchmarks._rollout_forgers import MAX_SAMPLES, SUBTLE, find_forgers, honest_problems

    rows = []
    for precision, kind, found_at in find_forgers():
        met = found_at is not None and found_at <= MAX_SAMPLES
        judged = {"target": f"at most {MAX_SAMPLES}", "met": met} if (precision, kind) not in SUBTLE else {}
        what = f"forged {kind}, {precision}: samples recomputed until it is found"
        shown = math.inf if found_at is None else found_at
        rows.append(Row(what=what, ours=shown, unit="samples", **judged))
    for precision, count in (("fp32", 200 if quick else 8_000), ("bf16", 100 if quick else 2_000)):
        accused = sum(map(bool, honest_problems(precision, count)))
        what = f"honest samples accused of {count:,}, {precision}, another arithmetic than the auditor's"
        rows.append(Row(what=what, ours=accused, unit="samples", target="0", met=accused == 0))
    return rows


def plan_rows(quick: bool) -> list[Row]:
    """Return how good predictions and choices of rollouts are."""
    from benchmarks._rollout_plans import excess_times, sequence_advice, step_errors

    errors = [abs(one) for one in step_errors(20)]
    num_pools = 20 if quick else 200
    excess = list(excess_times(num_pools))
    advice = [sequence_advice(seed, 400) for seed in range(4 if quick else 8)]
    evicted, worst = sum(one.evictions for one in advice), min(one.throughput_ratio for one in advice)
    swept = f"advised sequences at once, {len(advice)} engines"
    return [
        Row(what="predicted step, 20 runs of the real ledger on a virtual clock: largest difference", ours=max(errors),
            unit="", target="at most 0.05", met=max(errors) <= 0.05),
        Row(what=f"chosen roles, {num_pools} pools: step over the best of all, less 1, largest", ours=max(excess),
            unit="", target="at most 0.02", met=max(excess) <= 0.02),
        Row(what=f"{swept}: evictions", ours=evicted, unit="", target="0", met=evicted == 0),
        Row(what=f"{swept}: of the best throughput swept, smallest", ours=worst, unit="", target="at least 0.9",
            met=worst >= 0.9),
    ]  # fmt: skip


def learn_rows(quick: bool) -> list[Row]:
    """Return what is learned, and what a step costs."""
    from benchmarks._sums_runs import learn_sums
    from benchmarks._trl_sums import has_trl, trl_step_cpu_s

    steps, seeds = (20, (0,)) if quick else (800, (0, 1, 2))
    with tempfile.TemporaryDirectory() as folder:
        alone = [learn_sums(Path(folder), seed, steps) for seed in seeds]
        stale = {bound: learn_sums(Path(folder), 0, steps, bound, "b") for bound in (1, 4)}
        peer_s = trl_step_cpu_s(Path(folder)) if has_trl() else None
    reached = [one.held_out[steps] for one in alone]
    mean, what = sum(reached) / len(reached), f"two-digit sums, {steps} steps, held out"
    rows = [
        Row(what=f"{what}: mean of {len(seeds)} seeds", ours=mean, unit="", target="at least 0.9", met=mean >= 0.9),
        _learn_cost(min(one.cpu_s for one in alone), peer_s),
    ]
    for bound, one in stale.items():
        off = abs(one.held_out[steps] - reached[0])
        shown = f"{what}: staleness {bound} (mean {one.staleness:.2f}), seed 0"
        rows.append(
            compared(shown, one.held_out[steps], "", "staleness 0", reached[0], target="within 0.05", met=off <= 0.05)
        )
    return rows


def _learn_cost(ours_s: float, peer_s: float | None) -> Row:
    """Return the CPU seconds of a step beside TRL's, where it is installed."""
    what = "two-digit sums: a step of 256 samples"
    if peer_s is None:
        print("no trl: `pip install trl datasets` for its CPU seconds", file=sys.stderr)
        return Row(what=what, ours=ours_s, unit="CPU-s")
    return compared(what, ours_s, "CPU-s", "TRL", peer_s, target="at most half", met=ours_s <= 0.5 * peer_s)


def decode_rows(quick: bool) -> list[Row]:
    """Return what decoding that does not depend on the batch costs; torch is loaded for this part alone."""
    from benchmarks._decode_rates import decode_rates

    return list(decode_rates(quick))


def link_rows(quick: bool) -> list[Row]:
    """Return how fast weights reach sites over emulated links."""
    from benchmarks import _weights_links

    return _weights_links.link_rows(quick)


def site_rows(quick: bool) -> list[Row]:
    """Return the same by processes on this machine."""
    from benchmarks import _weights_links

    return _weights_links.site_rows(quick)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rows; 1 if a target is missed."""
    parts = {
        "delta": delta_rows, "ledger": ledger_rows, "trust": trust_rows, "plan": plan_rows, "learn": learn_rows,
        "decode": decode_rows, "links": link_rows, "sites": site_rows,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--quick", action="store_true", help="fewer weights, faults and tokens")
    parser.add_argument("--only", action="append", choices=list(parts), default=[], help="print this part alone")
    options = parser.parse_args(arguments)
    chosen = {name: lambda one=one: one(options.quick) for name, one in parts.items()}
    rows = run_parts(chosen, options.only or list(parts))
    print_rows(rows, options.json)
    return int(any(row.met is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
