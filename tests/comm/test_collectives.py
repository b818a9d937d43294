"""Rules of the collectives beyond the conformance kit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from isthmus.comm.group.create_group import IsthmusOptions
from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.group.transport_messages import GROUP_TAGS
from isthmus.comm.transport.memory_transport import MemoryTransport, memory_transports
from isthmus.core.errors import PeerError, PlanError
from isthmus.strategies import RANK_STRATEGIES, group_steps

pytestmark = pytest.mark.integration


def memory_groups(clusters: str, timeout_s: float = 30) -> list[IsthmusGroup]:
    """Return groups over the fake, without gloo."""
    timeout = timedelta(seconds=timeout_s)
    return [IsthmusGroup(one, list(clusters), timeout=timeout) for one in memory_transports(len(clusters))]


def errors_of(
    groups: Sequence[IsthmusGroup], calls: Sequence[Callable[[IsthmusGroup], dist.Work]]
) -> list[PeerError | None]:
    """Let rank `r` make `calls[r]`; return what each raises."""

    def run(group: IsthmusGroup, call: Callable[[IsthmusGroup], dist.Work]) -> PeerError | None:
        try:
            call(group).wait()
        except PeerError as error:
            return error
        return None

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(run, groups, calls))


def close(groups: Sequence[IsthmusGroup]) -> None:
    """Close all at once."""
    with ThreadPoolExecutor(len(groups)) as pool:
        list(pool.map(lambda group: group.close_with_error("over"), groups))


def summed(num: int, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Callable[[IsthmusGroup], dist.Work]:
    """Return a call of allreduce."""
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return lambda group: group.allreduce([torch.ones(num)], options)


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ([summed(4), summed(5), summed(4)], "float32"),
        ([summed(4), summed(4, dist.ReduceOp.MAX), summed(4)], "max"),
        ([summed(4), lambda group: group.barrier(), summed(4)], "barrier"),
        ([summed(4), lambda group: group.allreduce([torch.ones(4, dtype=torch.int64)]), summed(4)], "int64"),
    ],
    ids=["shape", "operation", "order", "type"],
)
@pytest.mark.parametrize("clusters", ["abc", "aab"])
def test_ranks_that_disagree_all_get_an_error(
    clusters: str, calls: list[Callable[[IsthmusGroup], dist.Work]], why: str
) -> None:
    """Long before the time-out: a rank that finds the disagreement sends the reason in place of what it owes."""
    groups = memory_groups(clusters)
    errors = errors_of(groups, calls)
    assert all(error is not None for error in errors)
    assert all(why in str(error) for error in errors)
    again = errors_of(groups, [summed(4)] * 3)
    assert all("an earlier collective of this group failed" in str(error) for error in again)
    close(groups)


def test_a_rank_that_does_not_call_fails_the_others_by_the_time_out() -> None:
    """The error names the rank that is missing; a rank that only passed results on fails with it."""
    groups = memory_groups("abc", timeout_s=0.2)
    errors = errors_of(groups[:2], [summed(4)] * 2)
    assert all("nothing from rank" in str(error) for error in errors)
    assert "nothing from rank 2 within 0.2 s" in str(errors[0])
    close(groups)


def test_a_lost_rank_fails_every_collective_under_way() -> None:
    """Also those that wait in the queue of the group's threads."""
    transports = memory_transports(3)
    groups = [IsthmusGroup(one, "abc") for one in transports]
    works = [group.allreduce([torch.ones(4)]) for group in groups[:2] for _ in range(6)]
    transports[2].kill()
    for work in works:
        with pytest.raises(PeerError, match=r"peer 2 closed its connection|earlier collective"):
            work.wait()
    close(groups[:2])


def test_operations_on_one_tensor_run_in_the_order_of_the_calls() -> None:
    """Without a wait between them, as on a stream: a sum of sums, not of what was there before."""
    groups = memory_groups("ab")
    tensors = [torch.ones(300_000) for _ in groups]
    works = [group.allreduce([tensor]) for group, tensor in zip(groups, tensors, strict=True) for _ in range(3)]
    for work in works:
        work.wait()
    assert all(bool((tensor == 8).all()) for tensor in tensors)
    close(groups)


def test_a_sent_tensor_may_change_once_the_work_is_done() -> None:
    """A copy is sent, since a message is kept until its acknowledgement."""
    groups = memory_groups("ab")
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    got, sent = torch.zeros(5), torch.ones(5)
    work = groups[0].broadcast([sent], options)
    work.wait()
    sent.zero_()
    groups[1].broadcast([got], options).wait()
    assert got.tolist() == [1.0] * 5
    close(groups)


def test_nan_and_infinity_reach_every_rank() -> None:
    """A sum or a maximum with NaN is NaN everywhere, never a number."""
    groups = memory_groups("aab")
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        options = dist.AllreduceOptions()
        options.reduceOp = op
        tensors = [torch.tensor([1.0, float("nan") if rank == 1 else 2.0, float("inf")]) for rank in range(3)]
        for work in [group.allreduce([one], options) for group, one in zip(groups, tensors, strict=True)]:
            work.wait()
        assert all(one.isnan().tolist() == [False, True, False] and one[2] == float("inf") for one in tensors)
    close(groups)


def test_arguments_that_do_not_fit_are_refused() -> None:
    """Before anything is sent: blocks of another size, splits of another sum."""
    (group,) = memory_groups("a")
    calls: list[Callable[[], dist.Work]] = [
        lambda: group.allgather([[torch.ones(3)]], [torch.ones(2)]),
        lambda: group.all_gather_single(torch.ones(3), torch.ones(2)),
        lambda: group.reduce_scatter([torch.ones(3)], [[torch.ones(2)]]),
        lambda: group.reduce_scatter_single(torch.ones(3), torch.ones(2)),
        lambda: group.all_to_all_single(torch.ones(2), torch.ones(2), [2], [1]),
        lambda: group.all_to_all_single(torch.ones(2), torch.ones(2), [3], [-1]),
    ]
    for call in calls:
        with pytest.raises(PlanError):
            call()
    close([group])


def test_a_rank_outside_the_group_is_refused_by_name() -> None:
    """As the other side of a message, as a root, and as the caller."""
    groups = memory_groups("ab")
    options = dist.BroadcastOptions()
    options.rootRank = 2
    calls: tuple[Callable[[IsthmusGroup], object], ...] = (
        lambda group: group.send([torch.ones(1)], 2, 0),
        lambda group: group.recv([torch.ones(1)], -3, 0),
        lambda group: group.broadcast([torch.ones(1)], options),
    )
    for call in calls:
        with pytest.raises(PlanError, match="outside this group of 2 ranks"):
            call(groups[0])
    with pytest.raises(PlanError, match="rank 1 is outside the group of ranks"):
        IsthmusGroup(groups[1].transport, ["a", "b"], ranks=[0])
    close(groups)


def test_all_ranks_get_identical_bits() -> None:
    """Sums of rounded numbers: pieces, leaders and clusters never make copies of a parameter drift."""
    groups = memory_groups("abcab")
    for num in (1000, 400_000):
        tensors = [torch.randn(num, generator=torch.Generator().manual_seed(rank)) for rank in range(5)]
        expected = torch.stack(tensors).double().sum(0)
        for work in [group.allreduce([one]) for group, one in zip(groups, tensors, strict=True)]:
            work.wait()
        assert all(torch.equal(one, tensors[0]) for one in tensors)
        assert torch.allclose(tensors[0].double(), expected, atol=1e-5)
    close(groups)


@pytest.mark.parametrize("name", RANK_STRATEGIES)
def test_a_group_sums_by_a_named_strategy(name: str) -> None:
    """Two ranks in each of two clusters, in any order; every operation and dtype; as many bytes as the steps say."""
    transports = memory_transports(4)
    groups = [IsthmusGroup(one, "abba", synchronisation=name) for one in transports]
    for num, dtype, op in ((1, torch.int64, dist.ReduceOp.SUM), (1003, torch.float32, dist.ReduceOp.MAX),
                           (1003, torch.bfloat16, dist.ReduceOp.AVG)):  # fmt: skip
        options = dist.AllreduceOptions()
        options.reduceOp = op
        tensors = [torch.full((num,), float(rank)).to(dtype) for rank in range(4)]
        before = _sent_bytes(transports)
        for work in [group.allreduce([one], options) for group, one in zip(groups, tensors, strict=True)]:
            work.wait()
        expected = {dist.ReduceOp.SUM: 6.0, dist.ReduceOp.MAX: 3.0, dist.ReduceOp.AVG: 1.5}[op]
        assert all(bool((one == expected).all()) for one in tensors)
        steps = group_steps(name, "abba", num)
        assert _sent_bytes(transports) - before == sum(one.stop - one.start for one in steps) * dtype.itemsize
    close(groups)


def test_only_senders_send_across_and_the_sums_are_the_same() -> None:
    """Ranks 0 and 2 of two clusters send for the others, also in a group of some ranks."""
    transports = memory_transports(4)
    for ranks in ((0, 1, 2, 3), (1, 2, 3)):
        groups = [
            IsthmusGroup(transports[one], "aabb", senders=(0, 2), ranks=ranks, tag_base=(len(ranks) - 3) * GROUP_TAGS)
            for one in ranks
        ]
        before = _sent_by_pair(transports)
        tensors = [torch.arange(100_000.0) * (place + 1) for place in range(len(ranks))]
        for work in [group.allreduce([one]) for group, one in zip(groups, tensors, strict=True)]:
            work.wait()
        total = torch.arange(100_000.0) * sum(range(len(ranks) + 1))
        assert all(torch.equal(one, total) for one in tensors)
        sent = _sent_by_pair(transports)
        across = {
            one for (one, peer), num in sent.items() if num > before.get((one, peer), 0) and (one < 2) != (peer < 2)
        }
        assert across == {0 if 0 in ranks else 1, 2}
    close(groups)


def _sent_by_pair(transports: Sequence[MemoryTransport]) -> dict[tuple[int, int], int]:
    return {(rank, to): now.sent_bytes for rank, one in enumerate(transports) for to, now in one.traffic().items()}


def _sent_bytes(transports: Sequence[MemoryTransport]) -> int:
    return sum(traffic.sent_bytes for one in transports for traffic in one.traffic().values())


def test_a_named_strategy_is_refused_where_clusters_are_unequal() -> None:
    """By name, with the sizes; a name that ranks cannot execute is refused at once."""
    group = IsthmusGroup(memory_transports(3)[0], "aab", synchronisation="2d-torus")
    with pytest.raises(PlanError, match=r"'2d-torus' needs equally many ranks in each cluster \(a: 2, b: 1\)"):
        group.allreduce([torch.ones(3)])
    group.abort()
    with pytest.raises(PlanError, match="no strategy of ranks is named 'passing'"):
        IsthmusOptions(memory_transports(1)[0], ("a",), synchronisation="passing")
