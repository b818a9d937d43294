"""Breaking a gloo group wakes every waiter in it, also where the first of the other ranks is gone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from isthmus.comm.group.vendors.gloo_vendor import break_gloo_group, gloo_group
from isthmus.comm.group.vendors.join_vendors import join_vendors
from isthmus.comm.transport.memory_transport import memory_transports
from tests.comm.ranks import LIMIT


def test_who_waits_for_a_living_rank_is_woken_though_another_is_gone() -> None:
    """1. rank 0 is gone; 2. rank 2 waits for rank 1, which lives and is silent; 3. the group is broken."""
    store = dist.HashStore()

    def join(rank: int) -> dist.ProcessGroupGloo:
        return gloo_group(store, rank, 3, "127.0.0.1", timedelta(seconds=60))

    with ThreadPoolExecutor(3) as pool:
        groups = list(pool.map(join, range(3)))
        break_gloo_group(groups[0], 0, 3)
        waiting = pool.submit(groups[2].recv([torch.empty(1)], 1, 7).wait)
        with pytest.raises(RuntimeError):  # rank 0 is gone, as rank 2 sees it
            groups[2].recv([torch.empty(1)], 0, 7).wait(timedelta(seconds=60))
        assert not waiting.done()
        break_gloo_group(groups[2], 2, 3)
        with pytest.raises(RuntimeError):
            waiting.result(50)


def test_the_address_of_the_store_goes_down_a_tree() -> None:
    """Of eight ranks the first one sends it to three, and each other one gets it once."""
    transports = memory_transports(8)
    with ThreadPoolExecutor(len(transports)) as pool:
        groups = list(pool.map(lambda one: join_vendors(one, range(8), "127.0.0.1", LIMIT), transports))
    sent = [[peer for peer, of in one.traffic().items() if of.sent_messages] for one in transports]
    assert sent == [[1, 2, 3], [4, 5, 6], [7], [], [], [], [], []]
    tensors = [torch.ones(1) for _ in groups]
    for work in [of["cpu"].backend.allreduce([one]) for of, one in zip(groups, tensors, strict=True)]:
        work.wait(LIMIT)
    assert all(float(one) == 8 for one in tensors)
