"""What distance costs a pipeline: `python -m benchmarks.wan_pipeline [PART ...] [--json] [--quick]`.

Stages are processes of their own with virtual chips (a forward waits 20 ms, a backward 40) and exchange
activations of 2 MiB over emulated links of 1 Gbit/s. Parts:

- `distance`: six stages beside the critical path of the same schedule on the same wires (`isthmus.sim`, where
  a message inside a cluster takes no time), the same stages in one cluster, and the time of the computing
  thread in communication calls;
- `pipelining`: 1F1B of `torch.distributed.pipelining` over gloo, on links of emulated packets (root), which
  its TCP crosses directly, as ours does there; the speed of the critical path is the upper limit of both;
- `loss`: real packet loss (root, a TUN device per cluster), under the host's congestion control and ours;
- `uneven`: chips of speed 1 : 2 : 4 with layers to match, beside the sum of the three alone;
- `transport`: what messages of 2 MiB cost the computing process, and how long one takes, when a separate
  process owns the connections, beside threads; two ranks on this machine, no link;
- `simulator`: random plans beside `isthmus.sim`, which gets the message times that two ranks alone measured.

Our stages and the peer's take precedence over other work where the system permits it (real-time priority). A
step counts unless computing overran its time by more than 1 % of the step at some stage, which means that other
work kept the machine busy.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks._wan_peer import run_peer
from benchmarks._wan_run import Bed, Times, launch, measure, packets, pool_of, relayed
from benchmarks._wan_stage import run_ping, run_stage
from benchmarks._wan_transport import Cost, run_cost
from benchmarks.table import Row, compared, print_rows
from isthmus.core.base_model import TransportKind
from isthmus.core.plan import StageTime
from isthmus.schedule import Schedule, make_schedule, one_f_one_b, overlapped, zero_bubble
from isthmus.sim import SimulatedLink, best_warm_up, run_pipeline
from isthmus.wan.netns import effective_capabilities, unavailable_reason

STAGES = 6
TIME = StageTime(forward_s=0.02, backward_s=0.04)
LONG = StageTime(forward_s=0.0666, backward_s=0.1334)
SHORT = StageTime(forward_s=0.01, backward_s=0.02)
SHAPE, SMALL = (512, 1024), (256, 1024)
GBPS = 1.0
WIRE_SHARE = 0.965
"""What of a wire's rate is left to payload: frames, IP and TCP take the rest."""

HOPS = {1: "aaabbb", 2: "aabbcc"}
WITHIN = {20: 1.02, 50: 1.03, 100: 1.04}
SHARES = {20: 98.0, 50: 96.0}
NEAR = SimulatedLink(name="near", bytes_per_s=2e9, delay_s=5e-4)
"""About what a message inside a cluster takes: what a plan must know to hide it."""

Wires = dict[tuple[int, int], SimulatedLink]


def num_bytes(shape: tuple[int, int]) -> int:
    """Return the bytes of a message, fp32."""
    return shape[0] * shape[1] * 4


def wires_of(clusters: str, round_trip_ms: float, gbps: float = GBPS) -> Wires:
    """Return the wires between the stages that lie in different clusters, by stages."""
    rate, delay_s = gbps * 1e9 / 8 * WIRE_SHARE, round_trip_ms / 2e3
    return {
        ends: SimulatedLink(name=clusters[ends[0]] + clusters[ends[1]], bytes_per_s=rate, delay_s=delay_s)
        for ends in pairs(len(clusters))
        if clusters[ends[0]] != clusters[ends[1]]
    }


def pairs(count: int) -> list[tuple[int, int]]:
    """Return the neighbouring stages, in both directions."""
    return [ends for s in range(count - 1) for ends in ((s, s + 1), (s + 1, s))]


def with_near(wires: Mapping[tuple[int, int], SimulatedLink], count: int, near: SimulatedLink = NEAR) -> Wires:
    """Return `wires`, and between all other neighbours one such as `near` each."""
    return {ends: wires.get(ends) or replace(near, name=f"near {ends}") for ends in pairs(count)}


def best(times: Sequence[StageTime], count: int, wires: Wires, shape: tuple[int, int]) -> Schedule:
    """Return the overlapped schedule with the best warm-up, messages inside a cluster considered."""
    stages = len(times)
    known = with_near(wires, stages)
    warm_up, _ = best_warm_up(times, known, num_bytes(shape), count, [count] * stages)
    return overlapped(stages, count, warm_up)


def distance(quick: bool) -> Iterator[Row]:
    """A row per round trip, number of micro-batches, number of hops, and length of computing."""
    cases = [(15, TIME), (64, TIME), (64, LONG)]
    for count, time in cases[:1] if quick else cases:
        times, alone = [time] * STAGES, dict[str, Times]()
        steps = 3 if quick or time is LONG else 6
        for clusters in ("a" * STAGES, *HOPS.values()):
            hops = len(set(clusters)) - 1
            for round_trip_ms in (0,) if not hops else (20,) if quick else (20, 50, 100):
                wires = wires_of(clusters, round_trip_ms)
                schedule = best(times, count, wires, SHAPE)
                bound_s = run_pipeline(schedule, times, wires, num_bytes(SHAPE)).step_s
                with relayed(pool_of(clusters, round_trip_ms, GBPS)) as bed:
                    found = measure(bed, clusters, schedule, times, SHAPE, steps, run_stage)
                pass_ms = 1e3 * (time.forward_s + time.backward_s)
                what = f"{round_trip_ms} ms, {hops} hops" if hops else "one cluster"
                what += f", {count} micro-batches of {pass_ms:.0f} ms"
                yield from _distance_rows(what, found, bound_s, round_trip_ms)
                alone.setdefault("one", found)
                if hops:
                    wanted = SHARES.get(round_trip_ms) if time is LONG else None
                    yield _share(what, alone["one"], found, wanted)


def _distance_rows(what: str, found: Times, bound_s: float, round_trip_ms: int) -> Iterator[Row]:
    within = WITHIN.get(round_trip_ms, 1.02)
    ratio = found.typical_s / bound_s
    yield Row(
        what=f"{what} ({found.said})", ours=found.typical_s, unit="s a step", peer="critical path",
        peer_value=bound_s, ratio=ratio, target=f"within {within - 1:.0%}", met=ratio <= within,
    )  # fmt: skip
    lost = 100 * statistics.median(found.calls)
    yield Row(
        what=f"{what}: computing thread's time in communication calls, busiest stage", ours=lost,
        unit="% of a step", target="under 1 %", met=lost < 1,
    )  # fmt: skip


def _share(what: str, alone: Times, found: Times, wanted: float | None) -> Row:
    share = 100 * alone.typical_s / found.typical_s
    more = {} if wanted is None else {"target": f">= {wanted:g} %", "met": share >= wanted}
    return compared(f"{what}: one cluster's rate", share, "%", "one cluster", 100.0, **more)


def pipelining(quick: bool) -> Iterator[Row]:
    """The same stages under torch's own 1F1B over gloo, and ours, by turns on the same links."""
    cases = [("aabb", 24, 20, TIME, SHAPE, 1.7)] if quick else [
        ("aaaa", 24, 0, TIME, SHAPE, 1.0),
        ("ab", 16, 20, TIME, SHAPE, 1.7), ("aabb", 24, 20, TIME, SHAPE, 1.7),
        ("ab", 16, 50, TIME, SHAPE, 3.0), ("aabb", 24, 50, TIME, SHAPE, 3.0),
        ("aabb", 24, 50, SHORT, SMALL, 3.0),
    ]  # fmt: skip
    for clusters, count, round_trip_ms, time, shape, factor in cases:
        pass_ms, mib = 1e3 * (time.forward_s + time.backward_s), num_bytes(shape) / 2**20
        what = f"{len(clusters)} stages, {count} micro-batches of {pass_ms:.0f} ms, {mib:g} MiB, "
        what += f"{round_trip_ms} ms"
        times, wires = [time] * len(clusters), wires_of(clusters, round_trip_ms)
        if round_trip_ms and (why := unavailable_reason(effective_capabilities())):
            yield Row(what=what, ours=0.0, unit="s a step", target=f"not measured: {why}")
            continue
        plan = best(times, count, wires, shape)
        bound_s = run_pipeline(plan, times, wires, num_bytes(shape)).step_s
        ours, theirs = list[float](), list[float]()
        with packets(pool_of(clusters, round_trip_ms, GBPS)) as bed:
            for _ in range(1 if quick else 2):
                ours += measure(bed, clusters, plan, times, shape, 3, run_stage).kept_s
                blocking = one_f_one_b(len(clusters), count)
                theirs += measure(bed, clusters, blocking, times, shape, 3, run_peer).steps_s
        mine_s, peer_s = statistics.median(ours), statistics.median(theirs)
        spread = f"ours {min(ours):.3f} to {max(ours):.3f} s, theirs {min(theirs):.3f} to {max(theirs):.3f} s"
        # 2 %: where nothing is to be hidden both wait for the same chips
        met = peer_s / mine_s >= (factor if round_trip_ms else 0.98)
        yield Row(
            what=f"{what} ({spread}): times as fast; the critical path would be {peer_s / bound_s:.2f}",
            ours=peer_s / mine_s, unit="x", peer="torch.distributed.pipelining 1F1B, gloo", peer_value=1.0,
            ratio=peer_s / mine_s, target=f">= {factor:g}", met=met,
        )  # fmt: skip


def loss(quick: bool) -> Iterator[Row]:
    """A link that loses one packet in a thousand, at 40 ms: random drops in the relay of the TUN devices."""
    clusters, count, gbps, shape = "aabb", 12 if quick else 24, 0.2, (256, 512)
    what = "loss 1e-3, 40 ms, 0.2 Gbit/s, 0.5 MiB, 4 stages"
    if why := unavailable_reason(effective_capabilities()):
        yield Row(what=what, ours=0.0, unit="% of ideal", target=f"not measured: {why}")
        return
    times, wires = [TIME] * len(clusters), wires_of(clusters, 40, gbps)
    plan = best(times, count, wires_of(clusters, 3 * 40, gbps), shape)  # ready for one resend a message
    bound_s = run_pipeline(plan, times, wires, num_bytes(shape)).step_s
    settings: list[tuple[str, dict[str, Any], bool]] = [
        ("host's cubic, BBR per socket, 4 lanes", {"congestion_control": "bbr"}, True),
        ("host's cubic left, 4 lanes", {"congestion_control": None}, False),
        ("host's cubic left, 1 lane", {"congestion_control": None, "lanes": 1}, False),
    ]
    with packets(pool_of(clusters, 40, gbps, loss=1e-3, congestion_control="cubic")) as bed:
        for how, options, ours in settings:
            steps = 3 if quick else 32 if ours else 8
            found = measure(bed, clusters, plan, times, shape, steps, run_stage, **options)
            share = 100 * bound_s / found.typical_s
            target: dict[str, Any] = {"target": ">= 90 %", "met": share >= 90} if ours else {}
            yield compared(f"{what}, {how} ({found.said})", share, "%", "ideal pipeline", 100.0, **target)


def uneven(quick: bool) -> Iterator[Row]:
    """Chips of speed 1, 2 and 4 with 4, 8 and 16 layers: all take as long; each alone has all 28."""
    count, chips = 16 if quick else 64, (1, 2, 4)
    rate = 0.0
    for speed in chips:
        factor = sum(chips) / speed
        time = StageTime(forward_s=SHORT.forward_s * factor, backward_s=SHORT.backward_s * factor)
        alone = measure(Bed(), "a", one_f_one_b(1, 8), [time], SHAPE, 3, run_stage)
        rate += 8 / alone.typical_s
    for name, plan in (
        ("zero bubble", zero_bubble(3, count)),
        ("overlapped", best([SHORT] * 3, count, {}, SHAPE)),
    ):
        found = measure(Bed(), "aaa", plan, [SHORT] * 3, SHAPE, 3 if quick else 6, run_stage)
        share = count / found.typical_s / rate
        what = f"speeds 1 : 2 : 4, {count} micro-batches, {name} ({found.said})"
        more: dict[str, Any] = {}
        if name == "zero bubble":
            more = {"target": ">= 0.97", "met": None if quick else share >= 0.97}
        yield compared(what, share, "of the sum", "sum of the three alone", 1.0, **more)


def transport(quick: bool) -> Iterator[Row]:
    """By turns: connections in a process of their own, and in threads."""
    found: dict[TransportKind, list[Cost]] = {"process": [], "thread": []}
    for _ in range(1 if quick else 5):
        for kind, costs in found.items():
            ranks = launch(
                Bed(),
                "ab",
                one_f_one_b(2, 1),
                [TIME] * 2,
                SHAPE,
                50 if quick else 200,
                run_cost,
                transport=kind,
            )
            costs += ranks[:1]

    def row(what: str, unit: str, read: Callable[[Cost], float], **more: Any) -> Row:
        ours, theirs = (sorted(map(read, found[kind])) for kind in ("process", "thread"))
        spread = f"{ours[0]:.3g} to {ours[-1]:.3g}, threads {theirs[0]:.3g} to {theirs[-1]:.3g}"
        mine, peer = statistics.median(ours), statistics.median(theirs)
        return compared(f"messages by a process, {what} ({spread})", mine, unit, "by threads", peer, **more)

    yield row("CPU of who computes", "s a GB", lambda one: one.own_s)
    yield row("CPU of both", "s a GB", lambda one: one.own_s + one.beside_s)
    yield row("computing thread's calls", "us a message", lambda one: 1e6 * one.call_s)
    yield row("64 KiB there", "ms", lambda one: 1e3 * statistics.median(one.small_s))
    yield row("2 MiB there", "ms", lambda one: 1e3 * statistics.median(one.large_s))
    yield row("rate of small products beside 1 Gbit/s each way", "of that alone", lambda one: one.share)


def simulator(quick: bool, plans: int = 200) -> Iterator[Row]:
    """Random plans: stages, times, cuts, links, messages, schedules."""
    near = _near_wire()
    extra_s = _far_extra()
    errors = []
    for seed in range(min(plans, 6) if quick else plans):
        errors.append(_error(random.Random(seed), near, extra_s))
        print(f"plan {seed}: {errors[-1]:+.2%}", file=sys.stderr, flush=True)
    worst, mean = max(map(abs, errors)), statistics.fmean(map(abs, errors))
    what = f"{len(errors)} random plans, predicted from micro-benchmarks alone"
    yield Row(what=f"{what}: error, mean", ours=100 * mean, unit="%", target="<= 3 %", met=mean <= 0.03)
    yield Row(what=f"{what}: error, worst", ours=100 * worst, unit="%", target="<= 8 %", met=worst <= 0.08)


def _ping_s(bed: Bed, clusters: str, shape: tuple[int, int]) -> float:
    found = launch(bed, clusters, one_f_one_b(2, 1), [TIME] * 2, shape, 1, run_ping)
    return statistics.median(found[0][5:])


def _near_wire() -> SimulatedLink:
    """Return what a message inside a cluster takes, from two sizes of it."""
    small, large = (64, 1024), SHAPE
    small_s, large_s = (_ping_s(Bed(), "aa", shape) for shape in (small, large))
    rate = (num_bytes(large) - num_bytes(small)) / max(large_s - small_s, 1e-5)
    return SimulatedLink(name="near", bytes_per_s=rate, delay_s=max(small_s - num_bytes(small) / rate, 0.0))


def _far_extra() -> tuple[float, float]:
    """Return what a far message takes beyond its link: seconds, and seconds a byte."""
    over = []
    with relayed(pool_of("ab", 20, GBPS)) as bed:
        for shape in ((64, 1024), SHAPE):
            wire = wires_of("ab", 20)[0, 1]
            ideal_s = wire.delay_s + num_bytes(shape) / wire.bytes_per_s
            over.append(max(_ping_s(bed, "ab", shape) - ideal_s, 0.0))
    per_byte_s = max(over[1] - over[0], 0.0) / (num_bytes(SHAPE) - num_bytes((64, 1024)))
    return over[0], per_byte_s


def _error(chance: random.Random, near: SimulatedLink, extra_s: tuple[float, float]) -> float:
    """Draw a plan, predict its step, run it; return predicted over measured, less one."""
    count, micro_batches = chance.randint(2, STAGES), chance.randint(4, 16)
    cuts = sorted(chance.choice("abc") for _ in range(count))
    clusters = "".join(cuts)
    shape = (chance.choice((64, 128, 256, 512)), 1024)
    round_trip_ms, gbps = chance.choice((5, 10, 20, 40, 60)), chance.choice((0.4, 0.7, 1.0))
    forwards_s = [chance.uniform(0.008, 0.025) for _ in range(count)]
    if chance.random() < 0.5:
        forwards_s = forwards_s[:1] * count
    times = [StageTime(forward_s=s, backward_s=chance.uniform(1.5, 2.5) * s) for s in forwards_s]
    wires = wires_of(clusters, round_trip_ms, gbps)
    name = chance.choice(("overlapped", "overlapped", "1f1b", "gpipe", "zero_bubble"))
    if name == "overlapped":
        plan = best(times, micro_batches, wires, shape)
    else:
        plan = make_schedule(name, count, micro_batches)
    late_s = extra_s[0] + extra_s[1] * num_bytes(shape)
    far = {ends: replace(one, delay_s=one.delay_s + late_s) for ends, one in wires.items()}
    told = as_run(plan, wires)
    predicted_s = run_pipeline(told, times, with_near(far, count, near), num_bytes(shape)).step_s
    with relayed(pool_of(clusters, round_trip_ms, gbps)) as bed:
        found = measure(bed, clusters, plan, times, shape, 3, run_stage)
    return predicted_s / found.typical_s - 1


def as_run(plan: Schedule, wires: Wires) -> Schedule:
    """Return the plan as the runtime executes it: sends to another cluster are not waited for."""
    kept = tuple(
        tuple(
            one
            for one in stage
            if not (one.kind.startswith("wait_send") and (place, plan.peer_stage(place, one)) in wires)
        )
        for place, stage in enumerate(plan.stages)
    )
    return replace(plan, stages=kept)


PARTS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "distance": distance,
    "pipelining": pipelining,
    "loss": loss,
    "uneven": uneven,
    "transport": transport,
    "simulator": simulator,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (all)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one case of each part, fewer steps")
    parser.add_argument("--plans", type=int, default=200, help="random plans of `simulator`")
    chosen = parser.parse_args(arguments)
    if unknown := sorted(set(chosen.parts) - set(PARTS)):
        parser.error(f"no part '{unknown[0]}'; there are {', '.join(PARTS)}")
    rows: list[Row] = []
    for name in chosen.parts or PARTS:
        part = PARTS[name]
        for row in simulator(chosen.quick, chosen.plans) if part is simulator else part(chosen.quick):
            print(f"{row.what}: {row.ours:.4g} {row.unit}", file=sys.stderr, flush=True)
            rows.append(row)
    print_rows(rows, chosen.json)


if __name__ == "__main__":
    main()
