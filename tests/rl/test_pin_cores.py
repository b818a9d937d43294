"""Rules of the cores of an engine's process."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from isthmus.rl.process.pin_cores import choose_cores, read_nodes


def test_ranks_get_cores_of_one_node() -> None:
    """Two nodes of four cores: four ranks have two each, none across nodes; ranks that would share are left alone."""
    nodes = [range(4), range(4, 8)]
    found = [choose_cores(range(8), nodes, rank, 4, 1) for rank in range(4)]
    assert found == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]
    assert choose_cores(range(8), nodes, 0, 4, 3) == frozenset()
    assert choose_cores([0, 1], [], 1, 2, 1) == {1}
    assert choose_cores([0], [], 0, 2, 1) == frozenset()


@given(st.sets(st.integers(0, 40), min_size=1), st.lists(st.sets(st.integers(0, 40)), max_size=3), st.integers(1, 6),
       st.integers(1, 4))  # fmt: skip
def test_ranks_never_share_a_core(
    allowed: set[int], nodes: list[set[int]], ranks: int, threads: int
) -> None:  # fmt: skip
    """Whatever the machine: all ranks are pinned to as many cores, or none is."""
    apart = [one - set().union(*nodes[:at]) for at, one in enumerate(nodes)]
    found = [choose_cores(allowed, apart, rank, ranks, threads) for rank in range(ranks)]
    assert len({len(one) for one in found}) == 1
    assert sum(map(len, found)) == len(frozenset().union(*found))
    assert frozenset().union(*found) <= allowed
    assert all(len(one) >= threads for one in found) or not any(found)


def test_nodes_are_read_and_what_is_no_list_is_left_out(tmp_path: Path) -> None:
    """As the kernel writes them."""
    for name, text in {"node0": "0-2,5\n", "node1": "x-3\n", "node2": "9-4\n", "node3": "0-99999999\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(text)
    assert read_nodes(tmp_path) == [{0, 1, 2, 5}]
    assert read_nodes(tmp_path / "none") == []
