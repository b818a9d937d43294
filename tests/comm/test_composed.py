"""Rules of sums composed of a library inside clusters and messages between them."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from isthmus.comm.group.composed.composition import SumPath, agree
from isthmus.comm.group.composed.shares import cut_chunks, share, share_regions
from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.group.reduce_operation import ReduceOperation
from isthmus.comm.group.vendors.gloo_vendor import GLOO
from isthmus.comm.group.vendors.memory_vendor import memory_vendor
from isthmus.comm.group.vendors.vendor import Vendor
from isthmus.core.errors import PeerError
from isthmus.strategies import check_steps, plan_steps
from tests.comm.ranks import library_groups

pytestmark = pytest.mark.integration

SUM, MAX = ReduceOperation.of(dist.ReduceOp.SUM), ReduceOperation.of(dist.ReduceOp.MAX)


@given(st.text("abc", min_size=1, max_size=7), st.integers(1, 60), st.integers(1, 40))
def test_shares_cover_each_element_once_in_each_cluster(clusters: str, num_elements: int, chunk: int) -> None:
    """Chunks cover the tensor; in each, every cluster has one leader of each element, and steps sum them."""
    chunks = cut_chunks(num_elements, chunk, clusters)
    assert [one for start, stop in chunks for one in range(start, stop)] == list(range(num_elements))
    for start, stop in chunks:
        of = share_regions(stop - start, clusters)
        assert [one for region in of for one in range(region.start, region.stop)] == list(range(stop - start))
        for region in of:
            assert sorted(clusters[rank] for rank in region.contributors) == sorted(set(clusters))
        check_steps(plan_steps(of, clusters, 7), of)
        near = [rank for rank, name in enumerate(clusters) if name == clusters[0]]
        led = [range(*share(stop - start, len(near), place)) for place in range(len(near))]
        assert [one for part in led for one in part] == list(range(stop - start))


def test_the_way_of_a_sum_follows_from_its_size() -> None:
    """Short sums of two clusters by one rank of each, long ones in chunks, all others by steps."""
    vendor = memory_vendor(short_bytes=100, chunk_bytes=1000)
    composition = agree([{"cpu": vendor}] * 3, "aab")
    assert composition is not None
    ways = [
        composition.path(num_bytes, torch.float32, operation, num_clusters)
        for num_bytes, operation, num_clusters in [
            (100, SUM, 2), (100, SUM, 3), (100, MAX, 2), (500, SUM, 2), (1001, SUM, 2), (1001, MAX, 3),
        ]
    ]  # fmt: skip
    short, steps, chunks = SumPath.SHORT, SumPath.STEPS, SumPath.CHUNKS
    assert ways == [short, steps, steps, steps, chunks, chunks]
    assert composition.path(1001, torch.bool, SUM, 2) is steps, "a type that the library does not add"


def test_an_accelerators_library_sets_the_limits_for_all() -> None:
    """All ranks go one way, also those of a cluster of CPUs."""
    card = replace(GLOO, name="card", device_type="card", short_bytes=5, chunk_bytes=6)
    for vendors in ([{"cpu": GLOO, "card": card}, {"cpu": GLOO}], [{"cpu": GLOO}, {"cpu": GLOO, "card": card}]):
        composition = agree(vendors, "ab")
        assert composition is not None
        assert (composition.short_bytes, composition.chunk_bytes) == (5, 6)


@pytest.mark.parametrize("clusters", ["aabb", "aab", "abca"])
def test_many_chunks_overlap_and_end_with_equal_bits(clusters: str) -> None:
    """More chunks than cross at a time, with a rest; two sums under way, the second of which reads the first."""
    groups = library_groups(clusters, memory_vendor())
    num = 7_500_001
    tensors = [torch.randint(-9, 9, (num,)).float() for _ in clusters]
    expected = reduce(torch.add, tensors) * len(clusters)
    works = [group.allreduce([one]) for group, one in zip(groups, tensors, strict=True) for _ in range(2)]
    for work in works:
        work.wait()
    assert all(torch.equal(one, expected) for one in tensors)
    _close(groups)


@pytest.mark.parametrize("num", [8, 300_001])
def test_rounded_sums_have_the_same_bits_in_both_clusters(num: int) -> None:
    """By one rank of each cluster, and in chunks; a sum of negative zeros stays one."""
    groups = library_groups("aaabb", memory_vendor())
    tensors = [torch.randn(num, generator=torch.Generator().manual_seed(rank)) for rank in range(5)]
    for one in tensors:
        one[0] = -0.0
    for work in [group.allreduce([one]) for group, one in zip(groups, tensors, strict=True)]:
        work.wait()
    assert all(torch.equal(one.view(torch.int32), tensors[0].view(torch.int32)) for one in tensors)
    assert torch.signbit(tensors[0][0])
    _close(groups)


def test_an_average_and_nan_go_either_way() -> None:
    """The library adds, the division comes last; NaN of one rank reaches all."""
    groups = library_groups("aabb", memory_vendor())
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG
    for num in (8, 1000):
        tensors = [torch.full((num,), float(rank)) for rank in range(4)]
        tensors[2][1] = float("nan")
        for work in [group.allreduce([one], options) for group, one in zip(groups, tensors, strict=True)]:
            work.wait()
        assert all(one[0] == 1.5 and one[1].isnan() for one in tensors)
    _close(groups)


@pytest.mark.parametrize(
    ("clusters", "vendor"),
    [("aabb", replace(GLOO, chunk_bytes=1000)), ("abab", memory_vendor()), ("aabbcc", memory_vendor())],
)
def test_copies_and_scattered_sums_go_by_library_and_messages(clusters: str, vendor: Vendor) -> None:
    """Gathers, reduce-scatters and broadcasts of several chunks: the values of one process, by all network cards.

    What a rank sends to other clusters is its share of what must cross once to each. Two go one after the other through
    memory that they share.
    """
    used: Counter[str] = Counter()
    groups = library_groups(clusters, watched(vendor, used))
    size, num, away = len(clusters), 300_001, len(set(clusters)) - 1
    inputs = [
        torch.randint(-9, 9, (size, num), generator=torch.Generator().manual_seed(r)).float() for r in range(size)
    ]
    average = dist.ReduceScatterOptions()
    average.reduceOp = dist.ReduceOp.AVG
    sums, gathered = [torch.empty(num) for _ in groups], [torch.empty(size, num) for _ in groups]
    works = [group.reduce_scatter_single(*each, average) for group, *each in zip(groups, sums, inputs, strict=True)]
    works += [group.all_gather_single(*each) for group, *each in zip(groups, gathered, sums, strict=True)]
    for work in works:
        work.wait()
    expected = torch.stack(inputs).mean(0)
    assert all(torch.equal(one, expected) for one in gathered)
    assert used["_reduce_scatter_base"]
    assert used["_allgather_base"]
    sent = [bytes_sent_away(group) for group in groups]
    assert sent == pytest.approx([2 * away * sums[0].nbytes] * size, rel=0.01)
    root, options = size - 1, dist.BroadcastOptions()
    options.rootRank = root
    for work in [group.broadcast([one], options) for group, one in zip(groups, inputs, strict=True)]:
        work.wait()
    assert all(torch.equal(one, inputs[root]) for one in inputs)
    assert used["broadcast"]
    sent = [bytes_sent_away(group) - before for group, before in zip(groups, sent, strict=True)]
    assert sum(sent) == pytest.approx(away * inputs[0].nbytes, rel=0.01)
    assert max(sent) == pytest.approx(max(sent[root], 1), rel=0.01), "all ranks of the root's cluster send a share"
    _close(groups)


def watched(vendor: Vendor, used: Counter[str]) -> Vendor:
    """Return a vendor whose calls are counted by their names."""

    class Watched:
        def __init__(self, backend: Any) -> None:
            self.backend = backend

        def __getattr__(self, name: str) -> Any:
            used[name] += 1
            return getattr(self.backend, name)

    return replace(vendor, create=lambda *words: Watched(vendor.create(*words)))


def bytes_sent_away(group: IsthmusGroup) -> int:
    """Return what a rank has sent to ranks of other clusters."""
    own = group.clusters[group.rank()]
    return sum(one.sent_bytes for peer, one in group.transport.traffic().items() if group.clusters[peer] != own)


def test_a_rank_that_is_missing_fails_the_sum_of_both_clusters() -> None:
    """A rank of one cluster does not call: its cluster cannot agree, and the other gets nothing from it."""
    groups = library_groups("aabb", memory_vendor(), timeout_s=1.0)

    def error_of(group: IsthmusGroup) -> str:
        with pytest.raises(PeerError) as caught:
            group.allreduce([torch.ones(1000)]).wait()
        return str(caught.value)

    with ThreadPoolExecutor(3) as pool:
        errors = list(pool.map(error_of, groups[:3]))
    assert any("nothing from rank 3 within 1 s" in one for one in errors)
    _close(groups)


def _close(groups: list[IsthmusGroup]) -> None:
    with ThreadPoolExecutor(len(groups)) as pool:
        list(pool.map(lambda group: group.abort(), groups))
