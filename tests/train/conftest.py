"""Tests that compute on a card choose kernels as a worker does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from isthmus.train.device import set_up


@pytest.fixture(autouse=True)
def repeatable_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set a card up for the tests marked `gpu`, and nothing for others."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    set_up(torch.device("cuda", 0), torch.get_num_threads())
    yield
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_multithreading_enabled(True)
