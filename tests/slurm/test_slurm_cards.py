"""Which cards a rank's program sees: those of its rank, also where a hold has several allocations on a node."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from isthmus.agent.adapters.scheduler_adapter import Hold, HoldRequest, RankNeed, RankStart
from isthmus.agent.adapters.slurm.slurm_adapter import SlurmAdapter
from tests.slurm.conftest import require_slurm
from tests.slurm.samples import adapter_of
from tests.slurm.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.slow

SIZES = (2, 1, 1)
"""Cards of the ranks: together those of one node, in allocations of two sizes."""

PROGRAM = (
    "sh", "-c",
    'echo "$CUDA_VISIBLE_DEVICES|$ASCEND_RT_VISIBLE_DEVICES" >"$1/.seen"; mv "$1/.seen" "$1/seen"; sleep 600', "p",
)  # fmt: skip


@pytest.fixture(scope="module")
def npus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """One node with four cards that Slurm calls `npu`."""
    require_slurm()
    cluster = SlurmCluster("npus", tmp_path_factory.mktemp("npus"), nodes=1, gres="npu")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()


def hold_all(adapter: SlurmAdapter, *needs: RankNeed) -> Hold:
    """Hold cards for ranks, which are free."""
    request = HoldRequest(id=uuid.uuid4().hex, job="cards", attempt=1, ranks=needs, lease_s=60)
    deadline_s = time.monotonic() + 60
    while (hold := adapter.hold(request)).state != "granted":
        assert time.monotonic() < deadline_s, hold
        time.sleep(0.1)
    return hold


def start_all(adapter: SlurmAdapter, folder: Path, hold: Hold) -> list[str]:
    """Start each rank of a hold; return what each program saw."""
    folders = [folder / f"rank-{rank}" for rank in range(len(hold.cards))]
    deadline_s = time.monotonic() + 60
    for one, cards in zip(folders, hold.cards, strict=True):
        one.mkdir()
        adapter.start(RankStart(folder=one, cards=cards, hold=hold.id))
    while not all((one / "seen").exists() for one in folders):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return [(one / "seen").read_text().strip() for one in folders]


def whole_node(node: str) -> Iterator[RankNeed]:
    """Ranks that take all cards of a node."""
    return (RankNeed(node_group="h20", num_cards=num, node=node) for num in SIZES)


def release(adapter: SlurmAdapter, slurm: SlurmCluster, hold: Hold) -> None:
    adapter.release(hold.id)
    slurm.wait_empty()


def numbers(cards: tuple[str, ...]) -> str:
    return ",".join(card.rpartition("/")[2] for card in cards)


def test_ranks_of_two_sizes_on_one_node_see_their_own_cards(alpha: SlurmCluster, tmp_path: Path) -> None:
    """An allocation for each size of rank: no card is seen by two ranks."""
    adapter = adapter_of(alpha, tmp_path / "state", PROGRAM)
    hold = hold_all(adapter, *whole_node(alpha.nodes[0]))
    seen = start_all(adapter, tmp_path, hold)
    release(adapter, alpha, hold)
    assert seen == [f"{numbers(cards)}|" for cards in hold.cards]
    assert len(set(itertools.chain(*hold.cards))) == sum(SIZES)


def test_a_grant_is_dated_by_when_slurm_gave_it(alpha: SlurmCluster, tmp_path: Path) -> None:
    """The last allocation's time counts, and an agent that comes later finds the same."""
    state = tmp_path / "state"
    hold = hold_all(adapter_of(alpha, state, PROGRAM), *whole_node(alpha.nodes[0]))
    found = adapter_of(alpha, state, PROGRAM)
    assert hold in found.observe().holds
    started = alpha.run("squeue", "--noheader", "--format=%S").split()
    release(found, alpha, hold)
    assert hold.granted_at_s is not None
    last_s = max(datetime.fromisoformat(one).timestamp() for one in started)
    assert abs(hold.granted_at_s - last_s) < 2, "Slurm's own record has whole seconds"


def test_ranks_on_nodes_with_unlike_numbers_of_free_cards_all_start(alpha: SlurmCluster, tmp_path: Path) -> None:
    """One card is free on the first node, two on the second: an allocation has all, and each rank gets its own."""
    adapter = adapter_of(alpha, tmp_path / "state", PROGRAM)
    first, second = alpha.nodes[:2]
    taken = [
        hold_all(adapter, *(RankNeed(node_group="h20", num_cards=1, node=node) for _ in range(num)))
        for node, num in ((first, alpha.num_cards - 1), (second, alpha.num_cards - 2))
    ]
    hold = hold_all(adapter, *(RankNeed(node_group="h20", num_cards=1) for _ in range(3)))
    seen = start_all(adapter, tmp_path, hold)
    for one in (hold, *taken):
        adapter.release(one.id)
    alpha.wait_empty()
    assert sorted(card.split("/")[1] for (card,) in hold.cards) == [first, second, second]
    assert seen == [f"{numbers(cards)}|" for cards in hold.cards]


def test_cards_that_slurm_does_not_call_gpus_are_held_by_rank_and_named_to_the_program(
    npus: SlurmCluster, tmp_path: Path
) -> None:
    """Slurm counts them by node alone and sets no variable: a rank is an allocation, and its program is told."""
    adapter = adapter_of(npus, tmp_path / "state", PROGRAM)
    hold = hold_all(adapter, *whole_node(npus.nodes[0]))
    seen = start_all(adapter, tmp_path, hold)
    assert npus.num_held() == len(SIZES)
    assert [len(node.cards) for node in adapter.observe().nodes] == [npus.num_cards]
    assert not [job for job in adapter.observe().foreign if job.cards]
    release(adapter, npus, hold)
    assert seen == [f"|{numbers(cards)}" for cards in hold.cards]
    assert sorted(itertools.chain(*hold.cards)) == [f"h20/{npus.nodes[0]}/{card}" for card in range(npus.num_cards)]
