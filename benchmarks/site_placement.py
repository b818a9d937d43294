"""Placement inside a site: CPU time, distance from the best, waits of large gangs, and the number of moves.

`python -m benchmarks.site_placement [--json] [--quick] [--only PART] [--seed S]`.

`time`: requests on 10,000 nodes in ToRs of 32, super-nodes of 128 and spines of 1,280, kept about nine tenths full by
parts that come and go; each request is timed alone, with what it takes to learn what changed since the last one.

`exact`: on sites of up to 12 nodes the cost of each placement, level by level, is compared with the least of all
placements (`tests/site/gangs.py`). `volume`: on larger sites as many parts as the site has cards, of sizes that
leave gaps too, are placed while they fit: all at once, the largest first, and one by one in random order. The bound is
their volume, which no placement can exceed, and often no choice of parts packs into the nodes without gaps. The most
that packs is computed exactly (`benchmarks/_packing_bound.py`), and the parts of that packing are placed too, the
largest first: what they leave is the gap of the placement alone, without the choice of parts, which is the queue's.

`waits`: a week's trace with gangs of whole ToRs (`benchmarks/_site_week.py`), the same queue and the same jobs for all
policies: first fit, best fit, ours without moves, and ours with moves.

`moves`: random sites with up to 20 parts and a waiting one; the fewest moves by trying all sets of up to three parts
and all places of what moves.

`agents`: the same trace in the pool simulator twice, with the server's and the agents' own code: without moves, and
with moves as `policy.yaml` allows them (`benchmarks/_pool_moves.py`). Work lost is what a moved job does again, since
no checkpoint has saved it.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Sequence
from functools import partial
from statistics import fmean

from benchmarks._packing_bound import packing_bound
from benchmarks._pool_moves import CHECKPOINT_INTERVAL_S, NODES, RULES, simulate_moves
from benchmarks._site_week import WeekResult, best_fit, first_fit, gang, ours, run_week, week
from benchmarks.table import Row, compared, print_rows, run_parts
from isthmus.core.owner.move_rules import MoveRules
from isthmus.site.topology.free_cards import FreeCards
from isthmus.site.topology.gang_placement import GangPlacement
from isthmus.site.topology.gang_request import GangRequest
from isthmus.site.topology.place_gang import place_gang
from isthmus.site.topology.plan_moves import plan_moves
from isthmus.site.topology.site_tree import SUPER_NODE, SiteTree
from tests.site.gangs import best_by_trying_all, busy, cost_key, num_spreads, tree_of
from tests.site.test_plan_moves import MAX_MOVES, fewest_moves, fill_site

MAX_SPREADS = 3_000
SIZES, ODD_SIZES = (1, 2, 4, 8, 8, 8, 16, 64), (1, 2, 3, 4, 5, 6, 8, 8, 8, 16, 24, 64)
"""Cards of a unit: usual ones, and others that leave gaps in nodes."""


def time_rows(requests: int, seed: int) -> list[Row]:
    chance = random.Random(seed)
    tree = tree_of(10_000, 8, tor=32, super_node=128, spine=1_280)
    free, live, cpu_ms = FreeCards(tree), list[GangPlacement](), list[float]()
    for _ in range(requests):
        request = _request(chance, (1, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512))
        gc.collect(0)
        cpu_s = time.process_time()
        found = place_gang(free, request)
        cpu_ms.append(1e3 * (time.process_time() - cpu_s))
        if isinstance(found, GangPlacement):
            for node, mask in found.taken.items():
                free.take(node, mask)
            live.append(found)
        while (live and free.total < 8_000) or (live and chance.random() < 0.3):
            for node, mask in live.pop(chance.randrange(len(live))).taken.items():
                free.give(node, mask)
    cpu_ms.sort()
    at = partial(_quantile, cpu_ms)
    what = f"10,000 nodes, {requests:,} requests of 1 to 4,096 cards"
    return [
        Row(what=f"{what}: p99", ours=at(0.99), unit="CPU ms", target="at most 25", met=at(0.99) <= 25),
        Row(what=f"{what}: p50", ours=at(0.5), unit="CPU ms"),
        Row(what=f"{what}: the longest", ours=cpu_ms[-1], unit="CPU ms"),
    ]


def exact_rows(sites: int, seed: int) -> list[Row]:
    chance = random.Random(seed)
    equal = total = refused = 0
    while total < sites:
        cards = chance.choice((1, 2, 4, 8))
        tor = chance.choice((0, 2, 3, 4))
        tree = tree_of(chance.randint(1, 12), cards, tor=tor, super_node=tor * chance.choice((0, 1, 2)))
        free = busy(tree, [chance.choice((0, cards, chance.randint(0, cards))) for _ in tree.nodes])
        ranks = chance.choice([size for size in (1, 2, 3, 4, 8) if size <= cards] + [2 * cards] * bool(tree.unit_level))
        request = gang(chance.randint(1, max(1, free.total // ranks)), ranks)
        piece = min(ranks, cards)
        if num_spreads([num // piece for num in free.counts], request.num_cards // piece) > MAX_SPREADS:
            continue
        total += 1
        found, best = place_gang(free, request), best_by_trying_all(free, request)
        if isinstance(found, GangPlacement):
            equal += cost_key(found.scores, request, tree) == best
        else:
            refused += 1
            equal += best is None
    what = f"{total:,} sites of up to 12 nodes ({refused:,} without a place)"
    return [
        compared(f"{what}: as good as the best of all placements", float(equal), "sites", "trying all", float(total),
                 target="equal", met=equal == total),
    ]  # fmt: skip


def volume_rows(sites: int, seed: int) -> list[Row]:
    chance = random.Random(seed)
    gaps: dict[str, list[float]] = {}
    for _ in range(sites):
        tree = tree_of(chance.choice((64, 256, 1_024)), 8, tor=16, super_node=32)
        requests, left = list[GangRequest](), sum(tree.cards)
        while left:
            request = _request(chance, (1, 2, 3, 4, 6, 8, 12, 16), most=left, sizes=ODD_SIZES)
            requests.append(request)
            left -= request.num_cards
        chance.shuffle(requests)
        batch = sorted(requests, key=lambda one: -max(unit.num_cards for unit in one.units))
        for order, some in (("together, the largest first", batch), ("one by one, as they come", requests)):
            for name, policy in (("ours", ours), ("first fit", first_fit)):
                free = FreeCards(tree)
                for request in some:
                    for node, mask in (policy(free, request) or {}).items():
                        free.take(node, mask)
                gaps.setdefault(f"{name}, {order}", []).append(100 * free.total / sum(tree.cards))
        packed = packing_bound(len(tree.nodes), tree.max_cards, batch)
        most, free = sum(one.num_cards for one in packed), FreeCards(tree)
        gaps.setdefault("bound", []).append(100 * (1 - most / sum(tree.cards)))
        for request in packed:
            for node, mask in (ours(free, request) or {}).items():
                free.take(node, mask)
        gaps.setdefault("packed", []).append(100 * (1 - (sum(tree.cards) - free.total) / most))
    rows = list[Row]()
    what = f"{sites} sites of 64 to 1,024 nodes"
    for label, kind, has_target in (
        ("what no packing into nodes can place", "bound", False),
        ("parts of the best packing, the largest first: volume left out of what packs", "packed", True),
    ):
        target, met = ("at most 2", max(gaps[kind]) <= 2) if has_target else ("", None)
        rows.append(Row(what=f"{what}, {label}, mean", ours=fmean(gaps[kind]), unit="%"))
        rows.append(Row(what=f"{what}, {label}, worst", ours=max(gaps[kind]), unit="%", target=target, met=met))
    for order, has_target in (("together, the largest first", True), ("one by one, as they come", False)):
        own, peer = gaps[f"ours, {order}"], fmean(gaps[f"first fit, {order}"])
        mean = fmean(own)
        target, met = ("at most 2", max(own) <= 2) if has_target else ("", None)
        label = f"{what}, parts {order}: volume left out"
        rows.append(compared(f"{label}, mean", mean, "% of the bound", "first fit", peer))
        rows.append(Row(what=f"{label}, worst", ours=max(own), unit="% of the bound", target=target, met=met))
    return rows


def wait_rows(weeks: int, seed: int, days: float) -> list[Row]:
    names = [str(node) for node in range(64)]
    tors = {f"t{at}": names[at : at + 8] for at in range(0, 64, 8)}
    tree = SiteTree.from_groups(dict.fromkeys(names, 8), {SUPER_NODE: tors})
    found: list[list[WeekResult]] = []
    for number in range(weeks):
        runs = [(first_fit, False), (best_fit, False), (ours, False), (ours, True)]
        found.append(
            [
                run_week(tree, week(tree, 8, 0.8, seed + number, 86_400 * days), policy, moves=moves)
                for policy, moves in runs
            ]
        )
    rows: list[Row] = []
    ratios = [results[3].large_wait_s / min(results[0].large_wait_s, results[1].large_wait_s) for results in found]
    for results in found:
        peer = min(results[:2], key=lambda one: one.large_wait_s)
        name = "first fit" if peer is results[0] else "best fit"
        for label, own in (("without moves", results[2]), ("with moves", results[3])):
            rows.append(
                compared(f"{days:g} days, {own.num_jobs:,} jobs, {label}: wait of whole-ToR gangs", own.large_wait_s,
                         "s", name, peer.large_wait_s)
            )  # fmt: skip
        what = f"{days:g} days, {peer.num_jobs:,} jobs, with moves: mean wait of all"
        rows.append(compared(what, results[3].wait_s, "s", name, peer.wait_s))
    last = [results[3] for results in found]
    mean = fmean(ratios)
    moved = sum(one.num_moves for one in last)
    pause = sum(one.pause_card_s for one in last) / (weeks * days * 86_400 * sum(tree.cards))
    return [
        *rows,
        Row(what=f"{weeks} traces: wait of whole-ToR gangs with moves against the better fit", ours=mean,
            unit=f"ratio ({min(ratios):.2f} to {max(ratios):.2f})", target="at most 0.75", met=mean <= 0.75),
        Row(what=f"{weeks} traces: moves", ours=float(moved), unit="moves"),
        Row(what=f"{weeks} traces: cards that stand still for moves", ours=100 * pause, unit="% of all card time"),
    ]  # fmt: skip


def move_rows(sites: int, seed: int) -> list[Row]:
    chance = random.Random(seed)
    equal = total = moved = 0
    while total < sites:
        cards = chance.choice((2, 4, 8))
        tree = tree_of(chance.randint(3, 8), cards)
        free = FreeCards(tree)
        running = fill_site(tree, free, chance)
        waiting = gang(chance.randint(1, max(1, free.total // cards)), cards)
        if isinstance(place_gang(free, waiting), GangPlacement):
            continue
        total += 1
        found = plan_moves(free, waiting, running, gain_card_s=1e9, max_moves=MAX_MOVES)
        least = fewest_moves(free, waiting, running, 0)
        moved += least is not None
        equal += (found is None and least is None) or (
            found is not None and least is not None and len(found.moved) == least[0]
        )
    what = f"{total:,} sites with up to 20 parts ({moved:,} where moves make room)"
    label = f"{what}: as few moves as the exact minimum"
    return [compared(label, float(equal), "sites", "trying all sets", float(total), target="equal", met=equal == total)]


def agent_rows(traces: int, jobs: int, seed: int) -> list[Row]:
    without = [simulate_moves(jobs, seed + number, MoveRules()) for number in range(traces)]
    moved = [simulate_moves(jobs, seed + number, RULES) for number in range(traces)]
    ratios = [one.wide_wait_s / other.wide_wait_s for one, other in zip(moved, without, strict=True)]
    what = f"{traces} traces of {jobs:,} jobs at {NODES} nodes"
    lost_s = max(one.most_lost_s for one in moved)
    return [
        compared(f"{what}, with moves: mean wait of jobs of whole nodes", fmean(one.wide_wait_s for one in moved), "s",
                 "without moves", fmean(one.wide_wait_s for one in without)),
        Row(what=f"{what}: ratio of the two, by trace", ours=fmean(ratios),
            unit=f"ratio ({min(ratios):.2f} to {max(ratios):.2f})", target="below 1", met=fmean(ratios) < 1),
        compared(f"{what}, with moves: mean wait of all jobs", fmean(one.wait_s for one in moved), "s",
                 "without moves", fmean(one.wait_s for one in without)),
        Row(what=f"{what}: moves", ours=float(sum(one.num_moves for one in moved)), unit="moves"),
        Row(what=f"{what}: most work lost by a move", ours=lost_s, unit="s",
            target=f"below {CHECKPOINT_INTERVAL_S:g}, one interval", met=lost_s < CHECKPOINT_INTERVAL_S),
    ]  # fmt: skip


def _request(
    chance: random.Random, nodes: Sequence[int], most: int = 1 << 30, sizes: Sequence[int] = SIZES
) -> GangRequest:
    """Return a random request: of less than a node, of whole nodes, or of units of several nodes."""
    while True:
        size = chance.choice(sizes)
        num = chance.choice(nodes) if size == 8 else chance.choice((1, 1, 2, 4, 8))
        if size * num <= most:
            return gang(num, size)
        if most < 8:
            return gang(1, most)


def _quantile(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="a few of each")
    parser.add_argument(
        "--only", choices=("time", "exact", "volume", "waits", "moves", "agents"), help="this part alone"
    )
    parser.add_argument("--seed", type=int, default=0, help="of sites, requests and traces")
    options = parser.parse_args()
    quick, seed = options.quick, options.seed
    parts = {
        "time": lambda: time_rows(300 if quick else 5_000, seed),
        "exact": lambda: exact_rows(60 if quick else 2_000, seed),
        "volume": lambda: volume_rows(3 if quick else 30, seed),
        "waits": lambda: wait_rows(1 if quick else 5, seed, 1 if quick else 7),
        "moves": lambda: move_rows(30 if quick else 1_000, seed),
        "agents": lambda: agent_rows(1 if quick else 4, 120 if quick else 400, seed),
    }
    print_rows(run_parts(parts, [options.only] if options.only else list(parts)), options.json)


if __name__ == "__main__":
    main()
