"""1,000 workers of one running job replaced, one after another, each by one at another node of its site.

The job has 50 replicas, each a pipeline over two sites of 64 nodes with 8 chips and 8 network cards. A replacement
gives one rank another node, address and port; the table then names the demands between addresses that end and begin, as
a network controller needs them. After every 20 replacements the numbers, nodes and addresses of all ranks are compared
with what each had after its own last one, and at the end all pairs of addresses with a table that is built afresh.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from benchmarks.table import Row, print_rows
from isthmus.control.algorithms.rank_table import RankTable
from isthmus.core.messages.agent_messages import WorkerAddress
from isthmus.core.plan import Plan, Prediction, Stage
from isthmus.core.pool import Cluster, NetworkCard, NodeGroup

SITES = ("east", "west")
STAGES_PER_SITE = 10
CARDS = 8
REPLACED_PER_LOOK = 20
"""Replacements between two comparisons of all ranks, which make 1,000 views with all their peers."""


def cluster(name: str, number: int, nodes: int) -> Cluster:
    """A site whose nodes have eight cards, each card in a network of its own."""
    nics = tuple(
        NetworkCard(name=f"ib{card}", addresses=tuple(f"10.{number}.{card}.{node}" for node in range(nodes)))
        for card in range(CARDS)
    )
    group = NodeGroup(name="g", chip="H20", nodes=nodes, chips_per_node=CARDS, nics=nics)
    return Cluster(name=name, owner="o", node_groups=(group,))


def make_plan(replicas: int) -> Plan:
    """A plan of `replicas` pipelines, each with ten stages at the first site, then ten at the second."""
    stages = tuple(
        Stage(replica=replica, cluster=site, node_group="g", layers=(at, at + 1))
        for replica in range(replicas)
        for at, site in enumerate(site for site in SITES for _ in range(STAGES_PER_SITE))
    )
    predicted = Prediction(
        iteration_s=1, tgs_tokens_per_card_s=1, samples_per_s=1, peak_memory_bytes=(), wan_gbps=(1.0,) * replicas
    )
    return Plan(
        id="p", stages=stages, dp=replicas, micro_batches=8, micro_batch_size=1, sequence_length=1, predicted=predicted
    )


def measure(replicas: int) -> list[Row]:
    """Replace every worker of a job once."""
    plan = make_plan(replicas)
    half = len(plan.ranks) // 2
    nodes = half // CARDS + 2
    clusters = {name: cluster(name, number, nodes) for number, name in enumerate(SITES)}
    workers = [
        WorkerAddress(rank=rank, cluster=site, host=site, port=7000 + rank % half, device=device_of(rank % half))
        for rank, site in enumerate(plan.rank_clusters)
    ]
    table = filled(plan, clusters, workers)
    changed, wrong, spent_s, longest_s = 0, 0, 0.0, 0.0
    places = _places(table)
    for rank, worker in enumerate(workers):
        workers[rank] = worker.model_copy(update={"device": device_of(rank % half + CARDS), "port": 20_000 + rank})
        start_s = time.perf_counter()
        change = table.place(workers[rank])
        lasted_s = time.perf_counter() - start_s
        spent_s, longest_s = spent_s + lasted_s, max(longest_s, lasted_s)
        wrong += not (change.begun and change.ended)
        (places[rank],) = _places(table, [rank])
        if (rank + 1) % REPLACED_PER_LOOK == 0 or rank + 1 == len(workers):
            after = _places(table)
            changed += sum(a != b for a, b in zip(places, after, strict=True))
            places = after
    wrong += table.views() != filled(plan, clusters, workers).views()
    what = f"{len(workers):,} workers replaced"
    return [
        Row(
            what=f"{what}: other ranks' numbers or addresses changed",
            ours=changed,
            unit="",
            target="0",
            met=not changed,
        ),
        Row(what=f"{what}: links mapped again, all", ours=spent_s, unit="s", target="at most 1", met=spent_s <= 1),
        Row(what=f"{what}: links mapped again, longest", ours=1e3 * longest_s, unit="ms"),
        Row(what=f"{what}: wrong or missing pairs of addresses", ours=wrong, unit="", target="0", met=not wrong),
    ]


def device_of(place: int) -> str:
    """Return the device at a place of a site, counted over its nodes."""
    return f"g/{place // CARDS}/{place % CARDS}"


def _places(table: RankTable, ranks: Sequence[int] | None = None) -> list[tuple[object, ...]]:
    """Return number, node, addresses and port of ranks, by default of all."""
    views = table.views() if ranks is None else map(table.view, ranks)
    return [(one.rank, one.node, one.addresses, one.port) for one in views]


def filled(plan: Plan, clusters: dict[str, Cluster], workers: Sequence[WorkerAddress]) -> RankTable:
    """Return a table with all workers."""
    table = RankTable(plan, clusters)
    for worker in workers:
        table.place(worker)
    return table


def main() -> int:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="100 workers")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    rows = measure(5 if options.quick else 50)
    print_rows(rows, options.json)
    return 0 if all(row.met is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
