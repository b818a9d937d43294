"""Fixtures of several files: steps of curves, kernels of a card, one thread, sites without a shared disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from isthmus.train.communication.torch_device import configure_torch
from tests.train.site_ranks import Meet, Sites
from tests.train.threads import LONG, SAMPLED, SHORT


@pytest.fixture(scope="session")
def steps_of(whole: bool) -> Callable[[bool], int]:
    """Return over how many steps a curve is compared, given whether it is one of the sample."""
    return lambda is_sampled: LONG if whole else SAMPLED if is_sampled else SHORT


@pytest.fixture(autouse=True)
def repeatable_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set a card up for the tests marked `gpu`, and nothing for others."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    configure_torch(torch.device("cuda", 0), torch.get_num_threads())
    yield
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_multithreading_enabled(True)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One torch thread per stage and rank, as in a worker: summation order does not depend on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def meet(tmp_path: Path) -> Iterator[Meet]:
    """Start attempts whose sites keep their folders from one to the next."""
    attempts = []

    def start(*clusters: str) -> Sites:
        attempts.append(Sites(tmp_path, clusters))
        return attempts[-1]

    yield start
    for one in attempts:
        one.close()
