"""Rules of messages that gloo carries inside a cluster: sums as over the transport, and its failures too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from isthmus.comm.group.composed.near_messages import MIN_ELEMENTS
from isthmus.comm.group.group_work import tensor_bytes
from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.group.run_program import Combine
from isthmus.comm.group.transport_messages import TransportMessages
from isthmus.comm.group.vendors.gloo_vendor import GLOO
from isthmus.core.errors import PeerError
from isthmus.strategies import Message, plan_steps, rank_program, regions
from tests.comm.ranks import group_over, library_groups, transports

CLUSTERS = "aaab"
PIECE = 2 * MIN_ELEMENTS


def summed(group: IsthmusGroup, num: int, combine: Combine = torch.add) -> torch.Tensor:
    """Sum `num` values of each rank by `execute`; rank r adds r + 1."""
    of = regions.all_reduce(num, group.size())
    clusters = [group.clusters[one] for one in group.ranks]
    program = rank_program(plan_steps(of, clusters, PIECE), of, group.rank())
    got = torch.empty(num)
    values = torch.full((num,), float(group.rank() + 1))
    group.execute(group.reserve_programs(1), "sum", program, [(0, values)], [(0, got)], combine).wait()
    return got


def errors_of(calls: Sequence[Callable[[], object]]) -> list[PeerError | None]:
    """Make all calls at once; return what each raises."""

    def run(call: Callable[[], object]) -> PeerError | None:
        try:
            call()
        except PeerError as error:
            return error
        return None

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def test_gloo_carries_large_messages_and_the_sum_is_the_same() -> None:
    """Between ranks of a cluster the transport carries notices and receipts only, also of several sums in a row."""
    groups = library_groups(CLUSTERS, GLOO)
    for num in (MIN_ELEMENTS - 1, 5 * PIECE, 20 * PIECE + 3):
        before = [_near_bytes(one) for one in groups]
        with ThreadPoolExecutor(len(groups)) as pool:
            found = list(pool.map(partial(summed, num=num), groups))
        assert all(bool((one == 10).all()) for one in found)
        if num > PIECE:
            assert all(_near_bytes(one) - already < 4 * PIECE for one, already in zip(groups, before, strict=True))
    for one in groups:
        one.shutdown()


def _near_bytes(group: IsthmusGroup) -> int:
    own = group.clusters[group.rank()]
    return sum(traffic.sent_bytes for peer, traffic in group.transport.traffic().items() if CLUSTERS[peer] == own)


def test_a_rank_that_fails_tells_the_others_why() -> None:
    """Long before the time-out, to those that wait for its messages and to those that wait for its receipts."""
    groups = library_groups(CLUSTERS, GLOO)

    def full(*_: object, **__: object) -> torch.Tensor:
        raise ValueError("no memory is left")

    calls = [partial(summed, one, 20 * PIECE) for one in groups]
    errors = errors_of([partial(summed, groups[0], 20 * PIECE, full), *calls[1:]])
    assert all("no memory is left" in str(error) for error in errors)
    _close(groups)


def test_ranks_that_disagree_on_sizes_get_an_error() -> None:
    """Gloo would end the process: the receiver finds the size in the notice."""
    groups = library_groups("aa", GLOO)
    errors = errors_of([partial(summed, one, num) for one, num in zip(groups, (PIECE, PIECE + 8), strict=True)])
    assert all(error is not None for error in errors)
    assert any("bytes" in str(error) for error in errors)
    _close(groups)


def test_a_rank_that_does_not_call_fails_the_others_by_the_time_out() -> None:
    """It is named; gloo still carries messages of the group afterwards."""
    groups = library_groups("aa", GLOO, timeout_s=0.3)
    (error,) = errors_of([partial(summed, groups[0], 4 * PIECE)])
    assert "nothing from rank 1 within 0.3 s" in str(error)
    tensor = torch.zeros(3)
    receive = groups[0].recv([tensor], 1, 7)
    groups[1].send([torch.ones(3)], 0, 7).wait()
    receive.wait()
    assert tensor.tolist() == [1.0] * 3
    _close(groups)


@pytest.mark.parametrize("dies", [True, False], ids=["killed", "leaves"])
def test_a_rank_that_is_lost_wakes_those_that_wait_in_gloo(dies: bool) -> None:
    """Its notice came, its message never does."""
    both = transports(2)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(partial(group_over, "aa"), both)
        waiting = pool.submit(errors_of, [partial(summed, first, PIECE)])
        tag = TransportMessages(both[1], (0, 1), 0, 0, "sum", (), 30.0).tag_in_group(Message(0, 0))
        both[1].send(0, tag, "sum #0", tensor_bytes(torch.tensor([4 * PIECE]))).result(20)
        if dies:
            both[1].abort()
        else:
            both[1].close("the run is over")
        (error,) = waiting.result(20)
    assert error is not None
    first.close_with_error("over")
    second.close_with_error("over")


def _close(groups: Sequence[IsthmusGroup]) -> None:
    with ThreadPoolExecutor(len(groups)) as pool:
        list(pool.map(lambda group: group.close_with_error("over"), groups))
