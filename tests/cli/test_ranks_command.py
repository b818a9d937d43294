"""What `isthmus ranks` prints."""

from __future__ import annotations

from isthmus.control.algorithms.rank_table import RankTable
from isthmus.core.messages.agent_messages import WorkerAddress
from isthmus.core.plan import Prediction
from tests.cli.fake_server import FakeServer, run
from tests.control.samples import plan


def server() -> FakeServer:
    """A job over two sites, whose second rank has no worker yet."""
    made = FakeServer()
    made.add()
    known = {"iteration_s": 1, "tgs_tokens_per_card_s": 1, "samples_per_s": 1, "peak_memory_bytes": ()}
    rates = Prediction(wan_gbps=(1.25,), **known)
    table = RankTable(plan("a", "b").model_copy(update={"predicted": rates}), {})
    table.place(WorkerAddress(rank=0, cluster="a", host="10.0.0.1", port=7000, device="g/1/0"))
    made.ranks[next(iter(made.jobs))] = table.views()
    return made


def test_ranks_lists_cluster_node_addresses_and_peers() -> None:
    """A line for each rank; rank 0 is the master, and a link between clusters has its rate."""
    lines = run(server(), "ranks", "stdlib-moe").out.splitlines()
    assert lines[0].split() == ["rank", "cluster", "node", "addresses", "peers"]
    assert lines[1].split() == ["0", "(master)", "a", "g/1", "10.0.0.1", "1", "in", "b", "1.25", "Gbit/s"]
    assert lines[2].split() == ["1", "b", "-", "-", "0", "in", "a", "1.25", "Gbit/s"]


def test_ranks_json_has_the_fields_that_scripts_may_rely_on() -> None:
    """`[{rank, cluster, node, addresses, peers}]`, and the demands between addresses."""
    first, second = run(server(), "ranks", "stdlib-moe", "--json").json
    assert first["rank"] == 0
    assert (first["cluster"], first["node"], first["addresses"], first["port"]) == ("a", "g/1", ["10.0.0.1"], 7000)
    assert first["peers"] == [{"rank": 1, "cluster": "b", "gbps": 1.25, "pairs": []}]
    assert (second["node"], second["addresses"], second["port"]) == ("", [], None)


def test_ranks_of_an_unknown_job_is_an_error() -> None:
    """As for every command on a job."""
    assert run(FakeServer(), "ranks", "nothing").status == 5
