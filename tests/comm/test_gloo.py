"""Breaking a gloo group wakes every waiter in it, also where the first of the other ranks is gone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from isthmus.comm.group.vendors.gloo_vendor import break_gloo_group, gloo_group


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
