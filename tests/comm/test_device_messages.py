"""Rules of messages between the devices of a cluster, on a fake device that executes as late as it may."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from isthmus.comm.group.cluster_codec import ClusterCodec
from isthmus.comm.group.composed.device_program import DeviceProgramWork
from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.transport.memory_transport import memory_transports
from isthmus.comm.wire_formats.known_formats import WIRE_FORMATS
from isthmus.core.errors import PeerError
from isthmus.strategies import Region, plan_steps, rank_program
from tests.train.device_groups import LIMIT, device_groups, fake_device

NUM = 24


def on_ranks(groups: list[IsthmusGroup], run) -> list:  # type: ignore[no-untyped-def, type-arg]
    """Run `run(group)` in a thread for each rank."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(run, groups))


def messages_of(group: IsthmusGroup):  # type: ignore[no-untyped-def]
    """Return the messages of the group's device."""
    assert group.device_messages is not None
    return group.device_messages


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_sends_and_receives_is_matched(seed: int) -> None:
    """Three ranks send each other many messages; each begins them in an order of its own, and nothing is staged."""
    vendor, memory = fake_device()
    groups = device_groups("aaa", vendor)

    def run(group: IsthmusGroup) -> None:
        near, rank = messages_of(group), group.rank()
        calls = [(peer, tag, is_send) for peer in range(3) if peer != rank for tag in range(NUM) for is_send in (0, 1)]
        random.Random(seed + rank).shuffle(calls)
        got = {}
        for peer, tag, is_send in calls:
            after = memory.record(torch.device("cpu"))
            if is_send:
                near.send(torch.full((3, 2), float(100 * rank + tag)), peer, tag, after)
            else:
                target = torch.zeros(3, 2)
                got[peer, tag] = target, near.receive(target, peer, tag, after)
        for (peer, tag), (target, work) in got.items():
            work.wait(LIMIT)
            assert target.eq(100 * peer + tag).all()

    on_ranks(groups, run)
    assert memory.host_copies == 0
    on_ranks(groups, IsthmusGroup.shutdown)


def test_a_message_is_there_behind_its_mark_only() -> None:
    """Before the wait the target has wrong values, as memory that a device has not reached."""
    vendor, memory = fake_device()
    groups = device_groups("aa", vendor)
    after, target = memory.record(torch.device("cpu")), torch.zeros(4)
    work = messages_of(groups[1]).receive(target, 0, 5, after)
    messages_of(groups[0]).send(torch.arange(4.0), 1, 5, after).wait_until_called(LIMIT)
    work.wait_until_called(LIMIT)
    assert target.eq(7).all()
    work.wait(LIMIT)
    assert target.tolist() == [0.0, 1.0, 2.0, 3.0]
    on_ranks(groups, IsthmusGroup.shutdown)


def test_shapes_that_differ_fail_at_the_sender() -> None:
    """By an error that names both, before the library is called."""
    vendor, memory = fake_device()
    groups = device_groups("aa", vendor)
    after = memory.record(torch.device("cpu"))
    messages_of(groups[1]).receive(torch.zeros(4), 0, 5, after)
    with pytest.raises(PeerError, match=r"float32\[4\]"):
        messages_of(groups[0]).send(torch.zeros(5), 1, 5, after).wait_until_called(LIMIT)
    on_ranks(groups, IsthmusGroup.abort)


def test_a_lost_rank_fails_what_waits_for_it() -> None:
    """Posted receives and sends that nobody asked for."""
    vendor, memory = fake_device()
    groups = device_groups("aa", vendor)
    after = memory.record(torch.device("cpu"))
    receive = messages_of(groups[0]).receive(torch.zeros(4), 1, 5, after)
    send = messages_of(groups[0]).send(torch.zeros(4), 1, 6, after)
    groups[1].abort()
    with pytest.raises(PeerError):
        receive.wait(LIMIT)
    with pytest.raises(PeerError):
        send.wait_until_called(LIMIT)
    groups[0].abort()
    with pytest.raises(PeerError):
        messages_of(groups[0]).receive(torch.zeros(4), 1, 7, after)


def test_messages_that_are_under_way_at_the_close_fail() -> None:
    """Nothing waits for a thread that has ended."""
    vendor, memory = fake_device()
    groups = device_groups("aa", vendor)
    after = memory.record(torch.device("cpu"))
    receive = messages_of(groups[0]).receive(torch.zeros(4), 1, 5, after)
    messages_of(groups[0]).close()
    messages_of(groups[1]).send(torch.zeros(4), 0, 5, after)
    with pytest.raises(PeerError, match="closed"):
        receive.wait(LIMIT)
    on_ranks(groups, IsthmusGroup.abort)


@pytest.mark.parametrize(
    ("clusters", "wire_format"),
    [("aa", None), ("aaa", None), ("aabb", None), ("aab", None), ("abab", "bf16"), ("aabb", "block-int8")],
)
def test_programs_on_a_device_have_the_bits_of_those_on_the_host(clusters: str, wire_format: str | None) -> None:
    """Sums are taken in one order; host memory has only what another cluster receives."""
    size, num = len(clusters), 50_000
    tensors = [torch.randn(num, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    everyone = tuple(range(size))
    of = (Region(0, num // 2, everyone, everyone), Region(num // 2, num, everyone, everyone[-1:]))
    steps = plan_steps(of, clusters, 4096)
    vendor, memory = fake_device()
    found = []
    for groups in (device_groups(clusters, vendor), [IsthmusGroup(one, clusters) for one in memory_transports(size)]):

        def run(group: IsthmusGroup) -> torch.Tensor:
            rank = group.rank()
            program, got = rank_program(steps, of, rank), torch.zeros(num)
            codec = ClusterCodec(WIRE_FORMATS[wire_format], clusters, rank, None) if wire_format else None
            number, sent = group.reserve_programs(1), [(0, tensors[rank].clone())]
            work = group.execute(number, "sum", program, sent, [(0, got)], torch.add, codec)
            assert isinstance(work, DeviceProgramWork) is (group.device_messages is not None)
            work.wait(LIMIT)
            result = got.clone()
            got.zero_()  # the memory is the caller's again, though other ranks may not have read it
            return result

        found.append(on_ranks(groups, run))
        on_ranks(groups, IsthmusGroup.shutdown)
    for rank, (one, other) in enumerate(zip(*found, strict=True)):
        stop = num if rank == size - 1 else num // 2
        assert torch.equal(one[:stop], other[:stop])
    if len(set(clusters)) == 1:
        assert memory.host_copies == 0
    else:
        assert memory.host_copies > 0
