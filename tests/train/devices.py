"""`on_devices`: a rule of numbers holds on a CPU and on a card; without one it is skipped, and says so."""

from __future__ import annotations

import pytest
import torch

from isthmus.train.communication.host_staging import CudaCopyEngine, HostStaging

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")

on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=(pytest.mark.gpu, needs_gpu))])


def staging_for(device: torch.device) -> HostStaging | None:
    """Return how messages of a stage on `device` reach a group that carries host memory."""
    return HostStaging(CudaCopyEngine(device)) if device.type == "cuda" else None
