"""Times of strategies over shaped links, beside their equations and the simulator, for `benchmarks.passing`.

Hosts are network namespaces around a fabric; each has one link, limited in both directions, and ranks are processes
that sum gradients by the runtime's reducer. A real chip and network would need a hundred times the processor's rate, so
chips and links are scaled alike: bytes of gradients and rates of links are `FACTORS` times smaller, times stay as they
are. Rates, delays and the rate inside a host are measured on the same links with tensors sent to and fro.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks._star_network import Star, star_network, unavailable_reason
from benchmarks._strategy_ranks import ROW, StepSpan, StrategyWork, run_micro, run_works
from benchmarks._wan_run import launch
from benchmarks.table import Row
from isthmus.core.messages.switch_keys import job_number, job_switch_key
from isthmus.schedule import gpipe
from isthmus.sim.synchronisation import SyncCluster, seconds
from isthmus.strategies import group_steps
from isthmus.switch.packet import OVERHEAD_BYTES

FULL_GBPS = (10.0, 1.0)
FACTORS = {10.0: 2000, 1.0: 200}
"""Both are emulated by 5 Mbit/s: at less, a packet alone takes many milliseconds, and TCP is what is measured."""
PART_INTEGERS = 256
FRAME_BYTES = 14 + 20 + 8
"""Ethernet, IP and UDP headers of a packet."""

SECRET = "5e" * 32
BY_SWITCH = ("passing", "switchml")
PEERS = ("ring", "hierarchical-ring", "2d-torus", "psring", "switchml")
STRATEGIES = ("ring", "hierarchical-ring", "2d-torus", "2d-mesh", "parameter-server", "psring", "passing", "switchml")

MODELS = {"VGG19": (143_667_240, 0.20), "ResNet50": (25_557_032, 0.40)}
"""Parameters, and seconds in which a virtual chip computes a step: bound by communication, and by computing."""


@dataclass(frozen=True)
class Rates:
    """What was measured on the links: bytes per second and delays of a message, between hosts and inside one."""

    network_bytes_per_s: float
    network_delay_s: float
    inside_bytes_per_s: float
    inside_delay_s: float


@dataclass(frozen=True)
class Measured:
    """The median step, and the CPU seconds that all ranks took in it."""

    step_s: float
    cpu_s: float


def link_mbps(gbps: float) -> float:
    """Return the rate of an emulated link that stands for one of `gbps`."""
    return gbps * 1000 / FACTORS[gbps]


def scaled_elements(parameters: int, gbps: float) -> int:
    """Return the elements that stand for `parameters` on links of `gbps`, in whole rows."""
    return max(parameters // FACTORS[gbps] // ROW, 1) * ROW


@contextmanager
def switch_in(star: Star) -> Iterator[tuple[str, int]]:
    """Run `isthmus switch` in its namespace, with the secret of the pool, and yield its address."""
    namespace, address = star.switch
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "switch.secret"
        file.touch(mode=0o600)
        file.write_text(SECRET)
        argv = ["ip", "netns", "exec", namespace, sys.executable, "-m", "isthmus", "switch", "--host", address,
                "--pool-key-file", str(file), "--slots", "4096", "--json"]  # fmt: skip
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
            try:
                line = process.stdout.readline() if process.stdout else ""
                if not line:
                    raise OSError("the switch did not start")
                with suppress(OSError, AttributeError):  # as the ranks: a switch does not wait for a processor
                    os.sched_setscheduler(process.pid, os.SCHED_RR, os.sched_param(1))
                host, _, port = json.loads(line)["address"].rpartition(":")
                yield host, int(port)
            finally:
                process.kill()


def measured(
    star: Star, hosts: Sequence[str], chips: int, name: str, switch: tuple[str, int],
    works: Sequence[tuple[int, float]], steps: int,
) -> list[Measured]:  # fmt: skip
    """Return the time of each of `works` (elements, computing seconds) by strategy `name`.

    SwitchML sums nothing inside hosts: each of its workers is a cluster of its own there.
    """
    clusters = [f"{host}{chip}" if name == "switchml" else host for host in hosts for chip in range(chips)]
    host_of = {cluster: hosts[place // chips] for place, cluster in enumerate(clusters)}
    strategy = "passing" if name in BY_SWITCH else name
    key = job_switch_key(bytes.fromhex(SECRET), job_number("job"))
    asked = tuple(
        StrategyWork(num_elements=num, computes_s=computes_s, steps=steps, strategy=strategy, switch=switch, key=key)
        for num, computes_s in works
    )
    ranks: list[list[list[StepSpan]]] = launch(
        star.bed(host_of), clusters, gpipe(len(clusters), 1), (), (1, 1), 1, partial(run_works, asked)
    )
    found = []
    for place in range(len(asked)):
        rounds = list(zip(*(one[place] for one in ranks), strict=True))
        spans = [max(one.end_s for one in each) - each[0].start_s for each in rounds]
        cpus = [sum(one.cpu_s for one in each) for each in rounds]
        found.append(Measured(statistics.median(spans), statistics.median(cpus)))
    return found


def micro(star: Star, hosts: Sequence[str], mbps: float) -> Rates:
    """Measure a link and the inside of a host: a message of 4 bytes, and one of a quarter second each way at once."""
    large = max(int(mbps * 1e6 / 8 / 4 / 4), 1024)
    found = []
    for clusters, num in ((hosts[:2], large), (("x", "y"), 2**18)):
        sites = dict(zip(clusters, hosts if clusters != ("x", "y") else [hosts[0]] * 2, strict=False))
        bed = star.bed({one: sites[one] for one in clusters})
        ranks = launch(bed, clusters, gpipe(2, 1), (), (1, 1), 1, partial(run_micro, num))
        small_s, large_s = (statistics.median(each) for each in ranks[0])
        found += [4 * num / max(large_s - small_s, 1e-9), small_s]
    return Rates(*found)


def binding_bytes(name: str, hosts: int, chips: int, num_elements: int) -> float:
    """Return the bytes that the busiest host sends or receives, over those of the gradients, from the steps."""
    if name in BY_SWITCH:
        return 1.0 if name == "passing" else float(chips)
    clusters = [str(host) for host in range(hosts) for _ in range(chips)]
    sent, got = [0] * hosts, [0] * hosts
    for step in group_steps(name, clusters, num_elements):
        source, target = step.sender // chips, step.receiver // chips
        if source != target:
            sent[source] += step.stop - step.start
            got[target] += step.stop - step.start
    return max(*sent, *got) / num_elements


def equation_s(name: str, hosts: int, chips: int, num_elements: int, rates: Rates, mbps: float) -> float:
    """Return the bytes at the binding end at the rate of what carries them: messages, or packets of the switch."""
    rate = rates.network_bytes_per_s
    if name in BY_SWITCH:
        size = 4 * PART_INTEGERS
        rate = mbps * 1e6 / 8 * size / (size + OVERHEAD_BYTES + FRAME_BYTES)
    return binding_bytes(name, hosts, chips, num_elements) * 4 * num_elements / rate


def simulated_s(name: str, hosts: int, chips: int, num_elements: int, rates: Rates, mbps: float) -> float | None:
    """Return the simulator's time; None for parameter servers, which ranks play here: the simulator's are machines."""
    if name in ("psring", "parameter-server"):
        return None
    rate = 4 * num_elements * binding_bytes(name, hosts, chips, num_elements)
    rate /= equation_s(name, hosts, chips, num_elements, rates, mbps)
    cluster = SyncCluster(
        num_servers=hosts, chips_per_server=chips, num_aggregators=1, pcie_bytes_per_s=rates.inside_bytes_per_s,
        upi_bytes_per_s=rates.inside_bytes_per_s, nic_bytes_per_s=rate, link_bytes_per_s=rate,
        network_delay_s=rates.network_delay_s, ring_delay_s=rates.inside_delay_s,
    )  # fmt: skip
    return seconds(name, 4 * num_elements, cluster).total_s


def time_rows(quick: bool) -> Iterator[Row]:
    """Yield the times of a sum of 4 hosts x 4 workers by PASSING and each other strategy."""
    hosts, chips = ("abcd", 4) if not quick else ("ab", 2)
    if (why := unavailable_reason()) is not None:
        yield Row(what=f"PASSING time, {len(hosts)} x {chips}: skipped, {why}", ours=0, unit="rows")
        return
    for gbps in FULL_GBPS[:1] if quick else FULL_GBPS:
        mbps, num = link_mbps(gbps), scaled_elements(MODELS["ResNet50" if quick else "VGG19"][0], gbps)
        with star_network(hosts, mbps) as star, switch_in(star) as switch:
            rates = micro(star, hosts, mbps)
            times = {
                name: measured(star, hosts, chips, name, switch, [(num, 0.0)], 2 if quick else 3)[0]
                for name in ("passing", *(PEERS[-1:] if quick else PEERS))
            }
        what = f"PASSING time, {len(hosts)} x {chips}, {gbps:g} Gbit/s (links {mbps:g} Mbit/s)"
        own = times["passing"].step_s
        for name, found in times.items():
            bytes_ratio = binding_bytes(name, len(hosts), chips, num) / binding_bytes("passing", len(hosts), chips, num)
            expected = equation_s(name, len(hosts), chips, num, rates, mbps)
            simulated = simulated_s(name, len(hosts), chips, num, rates, mbps)
            if name != "passing":
                yield Row(
                    what=f"{what}: {name} over PASSING, {bytes_ratio:.2f} x the bytes at the binding end",
                    ours=found.step_s / own, unit="x", peer="ratio of bytes", peer_value=bytes_ratio,
                    ratio=found.step_s / own / bytes_ratio, target=">= 0.85 of the ratio of bytes",
                    met=found.step_s / own >= 0.85 * bytes_ratio,
                )  # fmt: skip
            yield _beside(f"{what}: {name}", found, "equation", expected, 0.15)
            if simulated is not None:
                yield _beside(f"{what}: {name}", found, "simulator", simulated, 0.15)


def step_rows(quick: bool) -> Iterator[Row]:
    """Yield step times and scaling efficiency of two models by every strategy."""
    shapes = [(2, 2)] if quick else [(2, 2), (2, 4), (4, 2), (4, 4)]
    if (why := unavailable_reason()) is not None:
        yield Row(what=f"training step: skipped, {why}", ours=0, unit="rows")
        return
    for num_hosts, chips in shapes:
        for gbps in FULL_GBPS[:1] if quick else FULL_GBPS:
            hosts, mbps = "abcd"[:num_hosts], link_mbps(gbps)
            with star_network(hosts, mbps) as star, switch_in(star) as switch:
                rates = micro(star, hosts, mbps)
                for name in ("ring", "passing") if quick else STRATEGIES:
                    works = [(scaled_elements(num, gbps), computes_s) for num, computes_s in MODELS.values()]
                    spans = measured(star, hosts, chips, name, switch, works, 1 if quick else 2)
                    for model, (num, computes_s), found in zip(MODELS, works, spans, strict=True):
                        what = f"training step, {model}, {num_hosts} x {chips}, {gbps:g} Gbit/s, {name}"
                        sync_s = simulated_s(name, num_hosts, chips, num, rates, mbps)
                        by = "simulator"
                        if sync_s is None:
                            sync_s, by = equation_s(name, num_hosts, chips, num, rates, mbps), "equation"
                        yield _beside(what, found, by, computes_s + sync_s, 0.10)
                        yield Row(what=f"{what}: scaling efficiency", ours=computes_s / found.step_s, unit="of ideal")
    yield Row(what="training step, atp: no runtime of its own; with slots for all it sends what switchml does",
              ours=0, unit="rows")  # fmt: skip


def _beside(what: str, found: Measured, peer: str, expected_s: float, within: float) -> Row:
    return Row(
        what=f"{what}, {1e3 * found.cpu_s:.0f} CPU ms of ranks", ours=1e3 * found.step_s, unit="ms", peer=peer,
        peer_value=1e3 * expected_s, ratio=found.step_s / expected_s, target=f"within {within:.0%} of the {peer}",
        met=abs(found.step_s / expected_s - 1) <= within,
    )  # fmt: skip
