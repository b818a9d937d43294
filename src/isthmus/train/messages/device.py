"""Where a stage computes: the choice of device, and what torch must be told about it."""

from __future__ import annotations

import os
from typing import Literal

import torch
import torch.distributed as dist

from isthmus.core.errors import PlanError

HOST_BACKENDS = ("isthmus", "gloo")
"""Process groups that carry tensors in host memory; all others carry those of their vendor's devices."""

DeviceWish = Literal["auto", "cpu", "cuda"]


def choose_device(wish: DeviceWish, *, virtual: bool, num_cuda: int) -> torch.device:
    """Return the device of a worker that sees `num_cuda` CUDA devices: those of the cards it was given.

    `auto` takes the first of them, and the CPU where there is none or the chip is `virtual`. Raises
    `PlanError` where `cuda` is asked for and there is none.
    """
    if wish == "cuda" and num_cuda == 0:
        raise PlanError(
            "device 'cuda' is asked for, and torch sees no CUDA device",
            hint="give the worker a card (CUDA_VISIBLE_DEVICES), install torch for it, or use device 'auto'",
        )
    if wish == "cpu" or num_cuda == 0 or (wish == "auto" and virtual):
        return torch.device("cpu")
    return torch.device("cuda", 0)


def set_up(device: torch.device, num_threads: int) -> None:
    """Choose threads and, on an accelerator, kernels that repeat their bits; an operation without one raises.

    With `warn_only` the backward of attention would stay with a faster kernel, whose bits differ from run to
    run. The workspace setting is what cuBLAS needs to repeat its bits, and is read at its first use. A
    backward runs in the thread that asks for it, as on a CPU: what it waits for is seen there.
    """
    torch.set_num_threads(num_threads)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # all of it is written before it is read
        torch.autograd.set_multithreading_enabled(False)


def synchronize(device: torch.device) -> None:
    """Return once all that this thread has asked `device` to compute is done, so that clocks measure work.

    Copies on streams of their own go on meanwhile: messages, snapshots.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def usable_backends(device: torch.device) -> tuple[str, ...]:
    """Return the process groups of this torch that can carry tensors of a stage on `device`."""
    if device.type == "cuda" and dist.is_nccl_available():
        return (*HOST_BACKENDS, "nccl")
    return HOST_BACKENDS


def device_name(device: torch.device) -> str:
    """Return what people call the device, such as `cuda:0 (NVIDIA H100)`; nothing for the CPU."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
