"""The decision centre of a deterministic network: `python -m benchmarks.wan_control [--json] [--quick]`.

- `admissions`: 1,000 nodes in 20 domains; every request is planned by the centre, prepared and committed at each domain
  of its path, all in this process; CPU seconds of all parties together.
- `exact`: small networks and batches of requests, beside a mixed-integer program (HiGHS through scipy): the bandwidth
  over time that the batch planner admits, of the most that any choice of paths can.
- `over-booking`: a long run of requests, releases and failures; every calendar is recounted as it goes.
- `re-routing`: a pipe that carries many bookings fails; CPU time until all of them are committed on other paths.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from random import Random

from benchmarks._wan_exact import exact_value
from benchmarks._wan_topologies import large_request, large_topology, small_batch, small_topology
from benchmarks.table import Row, compared, print_rows, run_parts
from isthmus.wan.control.wan_topology import WanTopology
from isthmus.wan.controller.controller_messages import AskPath, CentreEvent, PathChanged, ReleasePath, TimePassed
from isthmus.wan.controller.decision_centre import DecisionCentre
from isthmus.wan.controller.domain_controller import DomainController
from isthmus.wan.controller.pipe_bookings import PipeBookings
from isthmus.wan.controller.plan_batch import plan_batch
from isthmus.wan.controller.wan_network import WanNetwork

BANDWIDTHS_GBPS = (0.5, 1.0, 2.5)
HEAVY_GBPS = (5.0, 10.0, 25.0)


class WholeNetwork:
    """A centre and its domains in one process; every message arrives at once."""

    def __init__(self, topology: WanTopology) -> None:
        self.centre = DecisionCentre(topology)
        names = sorted({pipe.domain for pipe in topology.pipes})
        self.domains = {name: DomainController(self.centre.network, name, 1) for name in names}
        self.domain_of = {pipe.name: pipe.domain for pipe in topology.pipes}
        self.told: Counter[str] = Counter()

    def give(self, event: CentreEvent, now_s: float) -> None:
        """Pass an event to the centre, and all messages that follow from it."""
        events = [event]
        while events:
            for one in self.centre.handle(events.pop(), now_s):
                if isinstance(one, PathChanged):
                    self.told[one.state] += 1
                else:
                    events.append(self.domains[one.domain].handle(one.order, now_s))

    def set_down(self, pipe: str, is_down: bool, now_s: float) -> None:
        """Let a pipe fail or come back."""
        domain = self.domains[self.domain_of[pipe]]
        domain.set_down(pipe, is_down)
        self.give(domain.report(now_s), now_s)

    def over_booked(self) -> int:
        """Return the pipes that are over-booked, and what else is wrong, recounted at every domain."""
        return sum(len(one.invariants()) for one in self.domains.values())


def edges_of(topology: WanTopology) -> list[str]:
    """Return the nodes where requests begin and end."""
    return [node.name for node in topology.nodes if node.role == "edge"]


def admissions(quick: bool) -> Iterator[Row]:
    """Rows of admissions in a CPU second."""
    for label, bandwidths, count in (("light", BANDWIDTHS_GBPS, 6_000), ("heavy", HEAVY_GBPS, 4_000)):
        rng = Random(1)
        topology = large_topology(rng)
        network, edges = WholeNetwork(topology), edges_of(topology)
        count = count // 4 if quick else count
        events = [AskPath(request=large_request(rng, edges, n, bandwidths)) for n in range(count)]
        start_s = time.process_time()
        for event in events:
            network.give(event, 0.0)
        used_s = time.process_time() - start_s
        share = network.told["booked"] / count
        what = f"{label} load: requests answered, {count:,} over 1,000 nodes of 20 domains, {share:.1%} admitted"
        met = count / used_s >= 1_000 if label == "light" else None
        yield Row(what=what, ours=count / used_s, unit="1/CPU s", target="1,000" if met is not None else "", met=met)


def exact(quick: bool) -> Iterator[Row]:
    """Rows of the gap to the exact solver."""
    gaps, num_proved, ours_s, exact_s = [], 0, 0.0, 0.0
    count = 6 if quick else 40
    for seed in range(count):
        rng = Random(seed)
        topology = small_topology(rng)
        requests = small_batch(rng, topology)
        start_s = time.process_time()
        most, proved = exact_value(topology, requests, 60.0)
        middle_s = time.process_time()
        network = WanNetwork(topology)
        plans = plan_batch(network, PipeBookings(network.pipes, topology.bulk_share), requests, Random(seed), 400)
        ours_s, exact_s = ours_s + time.process_time() - middle_s, exact_s + middle_s - start_s
        num_proved += proved
        got = sum(one.bandwidth_gbps * (one.end_s - one.start_s) for one in requests if one.name in plans)
        gaps.append((1 - got / most) * 100 if most else 0.0)
    of = f"{count} small networks, {num_proved} solved exactly"
    mean = statistics.mean(gaps)
    yield Row(
        what=f"bandwidth x time below the exact solver's: mean, {of}", ours=mean, unit="%", target="1", met=mean <= 1
    )
    yield Row(what=f"bandwidth x time below the exact solver's: worst, {of}", ours=max(gaps), unit="%")
    yield compared(f"CPU of a batch, {of}", ours_s / count, "s", "HiGHS", exact_s / count)


def over_booking(quick: bool) -> Iterator[Row]:
    """Rows of the long run."""
    rng, count = Random(3), 20_000 if quick else 1_000_000
    topology = large_topology(rng, num_domains=6, nodes_a_domain=15)
    network, edges = WholeNetwork(topology), edges_of(topology)
    names, down, num_over, now_s = list[str](), list[str](), 0, 0.0
    pipes = sorted(network.domain_of)
    for number in range(count):
        now_s += 0.5
        while (network.centre.next_timer_s() or now_s + 1) <= now_s:
            network.give(TimePassed(), now_s)
        request = large_request(rng, edges, number, HEAVY_GBPS)
        later = {"start_s": request.start_s + now_s, "end_s": request.end_s + now_s}
        network.give(AskPath(request=request.model_copy(update=later)), now_s)
        names.append(request.name)
        if len(names) > 800:
            network.give(ReleasePath(names.pop(rng.randrange(len(names)))), now_s)
        if rng.random() < 0.002:
            down.append(rng.choice(pipes))
            network.set_down(down[-1], True, now_s)
        if len(down) > 2:
            network.set_down(down.pop(0), False, now_s)
        if number % 1_000 == 0:
            num_over += network.over_booked()
    num_over += network.over_booked()
    what = (
        f"over-booked pipes in {count:,} requests, {network.told['booked']:,} admitted, {network.told['moved']:,} moved"
    )
    yield Row(what=what, ours=num_over, unit="", target="0", met=num_over == 0)


def re_routing(quick: bool) -> Iterator[Row]:
    """Rows of the time until all bookings of a failed pipe have another path."""
    rng = Random(4)
    topology = large_topology(rng)
    network, edges = WholeNetwork(topology), edges_of(topology)
    for number in range(2_000):
        network.give(AskPath(request=large_request(rng, edges, number, BANDWIDTHS_GBPS)), 0.0)
    used = [name for name in sorted(network.domain_of) if network.centre.view.bookings_on(name)]
    busiest = sorted(used, key=lambda name: -len(network.centre.view.bookings_on(name)))[:20]
    for label, pipes in (("any pipe in use", rng.sample(used, 40)), ("busiest pipes", busiest)):
        pipes = pipes[:5] if quick else pipes
        times_ms, num_moved, num_broken = [], 0, 0
        for name in pipes:
            before = network.told.copy()
            start_s = time.process_time()
            network.set_down(name, True, 0.0)
            times_ms.append((time.process_time() - start_s) * 1e3)
            changed = network.told - before
            num_moved, num_broken = num_moved + changed["moved"], num_broken + changed["broken"]
            network.set_down(name, False, 0.0)
        each = f"{len(pipes)} failures, {num_moved / len(pipes):.0f} bookings each, {num_broken} without a path"
        median, target = statistics.median(times_ms), "50" if label == "any pipe in use" else ""
        what = f"bookings of a failed pipe committed on other paths, {label}, CPU, median: {each}"
        yield Row(what=what, ours=median, unit="ms", target=target, met=median <= 50 if target else None)
        yield Row(what=f"the same, {label}, for one booking", ours=sum(times_ms) / max(num_moved, 1), unit="ms")


PARTS = {"admissions": admissions, "exact": exact, "over-booking": over_booking, "re-routing": re_routing}


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object per row")
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    parser.add_argument("--only", choices=PARTS, action="append", help="one part; repeatable")
    options = parser.parse_args()
    parts = {name: partial(_rows, part, options.quick) for name, part in PARTS.items()}
    print_rows(run_parts(parts, options.only or PARTS), options.json)


def _rows(part: Callable[[bool], Iterator[Row]], quick: bool) -> list[Row]:
    return list(part(quick))


if __name__ == "__main__":
    main()
