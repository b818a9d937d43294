"""Rules of the process group beyond the conformance kit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from isthmus.comm.group.create_group import IsthmusOptions, create_group, register_backend
from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.group.vendors.gloo_vendor import GLOO
from isthmus.comm.transport.memory_transport import memory_transports
from isthmus.core.base_model import TransportKind
from isthmus.core.errors import PeerError, PlanError
from tests.comm.ranks import LIMIT, group_over, library_groups, transports
from tests.train.alive import no_collector

pytestmark = pytest.mark.integration


def test_a_receive_tells_when_its_message_was_under_way() -> None:
    """Over the transport, a receive knows when it was sent and when it had arrived, on its own clock."""
    now_s = [100.0]
    a, b = (IsthmusGroup(one, ["a", "b"]) for one in memory_transports(2, lambda: now_s[0]))
    a.send([torch.ones(1)], 1, 0).wait()
    now_s[0] = 103.0
    work = b.recv([torch.zeros(1)], 0, 0)
    work.wait()
    assert work.under_way == (100.0, 100.0)
    for group in (a, b):
        group.shutdown()


def test_reduction_has_the_same_bits_everywhere() -> None:
    """An allreduce adds in the order of ranks on every rank, so that copies of a parameter never drift."""
    groups = [IsthmusGroup(one, ["a", "b", "c"]) for one in memory_transports(3)]
    tensors = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    expected = tensors[0] + tensors[1] + tensors[2]
    works = [group.allreduce([tensor]) for group, tensor in zip(groups, tensors, strict=True)]
    for work in works:
        work.wait()
    assert all(torch.equal(tensor, expected) for tensor in tensors)
    for group in groups:
        group.shutdown()


def test_a_lost_peer_is_named_with_the_operation() -> None:
    """What waits for a lost peer raises `PeerError` with operation, peer and reason; so does a collective."""
    transports = memory_transports(2)
    a = IsthmusGroup(transports[0], ["a", "b"])
    waiting, collective = a.recv([torch.zeros(1)], 1, 4), a.allreduce([torch.zeros(1)])
    transports[1].kill()
    with pytest.raises(PeerError, match=r"receive from rank 1 \(tag 4\): peer 1 closed its connection"):
        waiting.wait()
    with pytest.raises(PeerError, match="peer 1 closed its connection"):
        collective.wait()
    with pytest.raises(PeerError, match="send to rank 1"):
        a.send([torch.zeros(1)], 1, 0).wait()
    a.close_with_error("over")


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_an_abandoned_group_leaves_nothing_open(kind: TransportKind) -> None:
    """Neither connections nor gloo's wait for the collector: losses may follow each other."""

    def meet_and_part() -> None:
        joined = transports(3, kind=kind)
        with ThreadPoolExecutor(3) as pool:
            groups = list(pool.map(partial(group_over, "aab"), joined))
            list(pool.map(lambda group: group.barrier().wait(), groups))
            list(pool.map(lambda one: one.abort(), joined))
            list(pool.map(lambda group: group.shutdown(), groups))

    here = psutil.Process()
    meet_and_part()  # torch keeps a pipe of its first store
    with no_collector():
        before = here.num_fds()
        meet_and_part()
        assert here.num_fds() - before <= (3 if kind == "process" else 0), "an arena's addresses stay"


def test_shape_and_type_must_be_those_that_were_sent() -> None:
    """A tensor of another type is refused at the receiver and named."""
    a, b = (IsthmusGroup(one, ["a", "b"]) for one in memory_transports(2))
    a.send([torch.ones(2, 3)], 1, 0).wait()
    with pytest.raises(PeerError, match=r"sent float32\[2,3\] where bfloat16\[2,3\] was expected"):
        b.recv([torch.ones(2, 3, dtype=torch.bfloat16)], 0, 0).wait()
    for group in (a, b):
        group.shutdown()


def test_what_the_group_cannot_do_is_refused() -> None:
    """Foreign devices in messages, NCCL's own sum, tags out of range and groups without a world get a `PlanError`."""
    register_backend()
    register_backend()
    group = IsthmusGroup(memory_transports(1)[0], ["a"])
    with pytest.raises(PlanError, match="cannot reduce"):
        group.allreduce([torch.ones(1)], SimpleNamespace(reduceOp="PREMUL_SUM"))
    with pytest.raises(PlanError, match="CPU tensor"):
        group.send([torch.ones(1, device="meta")], 0, 0)
    with pytest.raises(PlanError, match="tag -1"):
        group.recv([torch.ones(1)], 0, -1)
    with pytest.raises(PlanError, match="no other rank to receive from"):
        group.recv_anysource([torch.ones(1)], 0)
    with pytest.raises(PlanError, match="needs pg_options"):
        create_group(SimpleNamespace(timeout=LIMIT, global_ranks_in_group=[]), None)
    with pytest.raises(PlanError, match="isthmus group of all ranks"):
        create_group(SimpleNamespace(timeout=LIMIT, global_ranks_in_group=[0]), None)
    group.shutdown()


@pytest.mark.parametrize("clusters", ["aaa", "aab"])
def test_a_receive_without_a_source_gets_messages_of_any_rank(clusters: str) -> None:
    """Inside one cluster gloo finds the sender, over several the transport; a strided tensor gets the values."""
    groups = library_groups(clusters, GLOO)
    got = torch.zeros(2, 2).t()
    for sender in (1, 2, 1):
        work = groups[0].recv_anysource([got], 3)
        sent = groups[sender].send([torch.full((2, 2), float(sender))], 0, 3)
        work.wait()
        sent.wait()
        assert (work.source, got.tolist()) == (sender, [[sender, sender]] * 2)
    for group in groups:
        group.shutdown()


def test_a_receive_without_a_source_is_refused_where_two_carry_messages() -> None:
    """Gloo cannot withdraw a receive: a group that `names_sources` uses it beside the transport."""
    groups = library_groups("aab", GLOO, names_sources=True)
    with pytest.raises(PlanError, match="gloo carries the messages inside the clusters"):
        groups[0].recv_anysource([torch.zeros(1)], 3)
    alone = groups[2].recv_anysource([torch.zeros(1)], 3)
    groups[0].send([torch.ones(1)], 2, 3)
    alone.wait()
    assert alone.source == 0
    for group in groups:
        group.shutdown()


def test_a_loss_ends_a_receive_without_a_source() -> None:
    """It raises `PeerError`; a peer that has closed is passed over while others can send."""
    transports = memory_transports(3)
    group = IsthmusGroup(transports[0], ["a", "b", "c"])
    waiting = group.recv_anysource([torch.zeros(1)], 0)
    transports[1].close()
    assert not waiting.is_completed()
    transports[2].kill()
    with pytest.raises(PeerError, match=r"receive from any rank \(tag 0\): peer 2 closed its connection"):
        waiting.wait()
    group.shutdown()


def test_futures_carry_result_and_error() -> None:
    """`get_future` gives the tensors, or the error, without a wait."""
    transports = memory_transports(2)
    a, b = (IsthmusGroup(one, ["a", "b"]) for one in transports)
    got = torch.zeros(2)
    future = b.recv([got], 0, 0).get_future()
    a.send([torch.ones(2)], 1, 0)
    assert torch.equal(future.wait()[0], torch.ones(2))
    lost = b.recv([got], 0, 0).get_future()
    transports[0].kill()
    with pytest.raises(Exception, match="peer 0 closed"):
        lost.wait()
    a.close_with_error("over")
    b.close_with_error("over")


@pytest.mark.parametrize("asks", ["one", "both"])
def test_a_future_of_a_cluster_is_done_without_a_wait(asks: str) -> None:
    """As DDP uses it.

    1. A rank asks for the future of a sum inside its cluster. 2. It may wait for the sum as well, by another thread.
    3. The other rank joins the sum. 4. gloo calls the future before its work counts as done; the future is done.
    """
    a, b = library_groups("aa", GLOO)
    tensors = [torch.ones(2), torch.ones(2)]
    with ThreadPoolExecutor(1) as thread:
        work = a.allreduce([tensors[0]])
        future = work.get_future()
        waiting = [thread.submit(work.wait)] if asks == "both" else []
        b.allreduce([tensors[1]]).wait()
        done = thread.submit(future.wait) if not waiting else waiting[0]
        assert done.result(10.0)
        assert torch.equal(future.wait()[0], torch.full((2,), 2.0))
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(IsthmusGroup.shutdown, (a, b)))


@pytest.mark.slow
def test_torch_distributed_finds_the_backend() -> None:
    """`init_process_group("isthmus")` makes the group the default one, and `dist.*` calls reach it."""
    register_backend()
    dist.init_process_group(
        "isthmus",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        pg_options=IsthmusOptions(memory_transports(1)[0], ("a",)),
    )
    try:
        tensor = torch.full((2,), 3.0)
        dist.all_reduce(tensor)
        dist.barrier()
        assert tensor.tolist() == [3.0, 3.0]
        assert dist.get_backend() == "isthmus"
    finally:
        dist.destroy_process_group()
