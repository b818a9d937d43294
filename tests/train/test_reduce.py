"""Rules of the reduction: whatever the cuts, owners end with one sum, and each byte crosses the WAN once."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.transport.memory_transport import memory_transports
from isthmus.core.errors import PlanError
from isthmus.strategies import RANK_STRATEGIES
from isthmus.train.update.buckets import GradientBucket, HeldRows, ParameterSegment, make_buckets
from isthmus.train.update.gradient_options import GradientOptions
from isthmus.train.update.gradient_reducer import GradientReducer
from tests.train.devices import on_devices, staging_for
from tests.train.threads import GroupExchange

pytestmark = pytest.mark.integration

Tensors = dict[str, torch.Tensor]


class Rank:
    """What one thread holds: a tensor per `HeldRows`, whose numbers are small integers: every sum is exact."""

    def __init__(self, rank: int, held: list[HeldRows], device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(rank)
        self.held = {one.name: one for one in held}
        self.tensors: Tensors = {}
        for one in held:
            rows = one.at + one.stop - one.start
            shape = (rows, one.row_elements) if one.dim == 0 else (one.row_elements, rows)
            self.tensors[one.name] = torch.randint(0, 99, shape, generator=generator).float().to(device)

    def view(self, segment: ParameterSegment) -> torch.Tensor:
        one = self.held[segment.name]
        first = one.at + segment.start - one.start
        return self.tensors[segment.name].narrow(one.dim, first, segment.stop - segment.start)


def run(
    held: list[list[HeldRows]],
    clusters: str,
    buckets: tuple[GradientBucket, ...],
    *,
    everywhere: bool = True,
    device: str = "cpu",
    strategy: str | None = None,
) -> tuple[list[Rank], list[GroupExchange]]:
    """Reduce in as many threads as there are ranks."""
    groups = [IsthmusGroup(one, list(clusters)) for one in memory_transports(len(held))]
    exchanges = [GroupExchange(clusters, one, staging_for(torch.device(device))) for one in groups]
    ranks = [Rank(number, of_rank, device) for number, of_rank in enumerate(held)]

    def one(number: int) -> None:
        reducer = GradientReducer(
            buckets, number, exchanges[number], batch_elements=64, options=GradientOptions(strategy=strategy)
        )
        reducer.reduce(ranks[number].view, to_all_owners=everywhere)
        if not everywhere:
            reducer.broadcast_in_cluster(ranks[number].view)

    with ThreadPoolExecutor(len(held)) as pool:
        for done in [pool.submit(one, number) for number in range(len(held))]:
            done.result(60)
    for group in groups:
        group.shutdown()
    return ranks, exchanges


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[list[HeldRows]], str]:
    """Up to three replicas, each cut into stages and slices of its own, over up to three clusters."""
    names, held, clusters = "abcd", [], ""
    dims = {name: draw(st.sampled_from([0, 1])) for name in names}
    rows = {name: draw(st.sampled_from([4, 12])) for name in names}
    for _ in range(draw(st.integers(1, 3))):
        ends = sorted({*draw(st.sets(st.integers(1, 3), max_size=2)), 4})
        for first, last in zip([0, *ends], ends, strict=False):
            slices = draw(st.sampled_from([1, 2, 4]))
            for part in range(slices):
                held.append(
                    [
                        HeldRows(
                            name=name,
                            start=rows[name] * part // slices,
                            stop=rows[name] * (part + 1) // slices,
                            row_elements=3,
                            dim=dims[name],
                            at=draw(st.sampled_from([0, 2])),
                        )
                        for name in names[first:last]
                    ]
                )
                clusters += draw(st.sampled_from("xyz"))
    return held, clusters


@settings(max_examples=25, deadline=None)
@given(layouts(), st.sampled_from([1, 16, 64, 4096]), st.booleans())
def test_all_owners_end_with_the_sum(
    layout: tuple[list[list[HeldRows]], str], bucket_elements: int, everywhere: bool
) -> None:
    """Unlike stages and slices, any clusters, any bucket: every row is the sum over all who hold it.

    It is the same whether totals go to all owners at once or to leaders and from there to the others.
    """
    held, clusters = layout
    before = [Rank(number, of_rank) for number, of_rank in enumerate(held)]
    buckets = make_buckets(held, clusters, bucket_elements)
    after, _ = run(held, clusters, buckets, everywhere=everywhere)
    for segment in itertools.chain(*(one.segments for one in buckets)):
        owners = [r for r in before if _holds(r, segment)]
        expected = torch.stack([one.view(segment) for one in owners]).sum(0)
        for rank in after:
            if _holds(rank, segment):
                assert torch.equal(rank.view(segment), expected)


def _holds(rank: Rank, segment: ParameterSegment) -> bool:
    one = rank.held.get(segment.name)
    return one is not None and one.start <= segment.start and segment.stop <= one.stop


@settings(deadline=None)
@given(layouts(), st.sampled_from([1, 16, 64, 4096]))
def test_buckets_cover_each_row_once(layout: tuple[list[list[HeldRows]], str], bucket_elements: int) -> None:
    """Each row of each parameter is in one segment; owners of a segment hold all of it."""
    held, clusters = layout
    seen: set[tuple[str, int]] = set()
    for bucket in make_buckets(held, clusters, bucket_elements):
        for one in bucket.segments:
            rows = {(one.name, row) for row in range(one.start, one.stop)}
            assert not rows & seen
            seen |= rows
            owners = {r for r, of in enumerate(held) if any(h.name == one.name and h.start <= one.start
                      and one.stop <= h.stop for h in of)}  # fmt: skip
            assert owners == set(itertools.chain(*bucket.owners))
    assert seen == {(one.name, row) for of in held for one in of for row in range(one.start, one.stop)}


@on_devices
def test_each_byte_crosses_the_wan_once_in_each_direction(device: str) -> None:
    """Of four replicas in two clusters, each cluster sends every gradient once; of three clusters 4/3."""
    held = [[HeldRows.full("w", (64, 8))] for _ in range(6)]
    for clusters, crossings in (("aabb", 1.0), ("abc", 4 / 3), ("aabbcc", 4 / 3), ("aaaa", 0.0)):
        some = held[: len(clusters)]
        ranks, exchanges = run(some, clusters, make_buckets(some, clusters, 16), device=device)
        for cluster in set(clusters):
            near = [one for one, name in zip(exchanges, clusters, strict=True) if name == cluster]
            sent = sum(one.timer.wan_bytes for one in near)
            assert sent == pytest.approx(crossings * 64 * 8 * 4, rel=0.05)
        total = sum(Rank(rank, of_rank).tensors["w"] for rank, of_rank in enumerate(some))
        assert all(torch.equal(one.tensors["w"].cpu(), total) for one in ranks)


def test_leaders_share_the_work() -> None:
    """The ranks of a cluster lead about as many numbers each, whatever the sizes of parameters."""
    held = [[HeldRows.full("a", (1000, 16)), HeldRows.full("b", (16,)), HeldRows.full("c", (300, 32))]] * 3
    led = [0, 0, 0]
    for bucket in make_buckets(held, "xxx", 512):
        led[bucket.leaders[0]] += bucket.num_elements
    assert max(led) - min(led) <= 512


def test_a_copy_that_does_not_add_is_given_the_sum() -> None:
    """Of two copies in one replica, one of which does not add, the sum counts one and reaches both."""
    held = [[HeldRows.full("w", (4, 3))], [HeldRows(name="w", start=0, stop=4, row_elements=3, adds=False)]]
    before = Rank(0, held[0]).tensors["w"]
    ranks, _ = run(held, "ab", make_buckets(held, "ab"))
    assert all(torch.equal(one.tensors["w"], before) for one in ranks)


@pytest.mark.parametrize("strategy", RANK_STRATEGIES)
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_named_strategy_gives_the_sum(strategy: str, everywhere: bool) -> None:
    """Two ranks in each of two clusters, whatever the strategy; the sums of sharded updates too."""
    held = [[HeldRows.full("w", (37, 8))] for _ in range(4)]
    total = sum(Rank(rank, of_rank).tensors["w"] for rank, of_rank in enumerate(held))
    buckets = make_buckets(held, "aabb", 64)
    ranks, exchanges = run(held, "aabb", buckets, everywhere=everywhere, strategy=strategy)
    assert all(torch.equal(one.tensors["w"], total) for one in ranks)
    assert sum(one.timer.wan_bytes for one in exchanges) > 0


def test_a_strategy_that_the_owners_cannot_execute_is_refused_at_the_start() -> None:
    """Unequal clusters, and a copy that does not add."""
    held = [[HeldRows.full("w", (4, 3))] for _ in range(3)]
    with pytest.raises(PlanError, match=r"equally many ranks in each cluster \(a: 2, b: 1\)"):
        run(held, "aab", make_buckets(held, "aab"), strategy="ring")
    held[1] = [HeldRows(name="w", start=0, stop=4, row_elements=3, adds=False)]
    with pytest.raises(PlanError, match="not all of them add"):
        run(held[:2], "ab", make_buckets(held[:2], "ab"), strategy="ring")
