"""The device of a stage: its choice, torch settings for it, and the process groups that support it."""

from __future__ import annotations

import os
from typing import Literal

import torch
import torch.distributed as dist

from isthmus.core.errors import PlanError

HOST_BACKENDS = ("isthmus", "gloo")
"""Process groups that send from host memory; all others send from device memory of one vendor."""

DeviceChoice = Literal["auto", "cpu", "cuda"]


def choose_device(choice: DeviceChoice, *, virtual: bool, num_cuda: int) -> torch.device:
    """Return the device of a worker to which `num_cuda` CUDA devices are visible.

    `auto` takes the first one, or the CPU if there is none or the chip is `virtual`. Raises `PlanError` if
    `cuda` is requested and there is none.
    """
    if choice == "cuda" and num_cuda == 0:
        raise PlanError(
            "device 'cuda' is requested, but torch sees no CUDA device",
            hint="assign a GPU (CUDA_VISIBLE_DEVICES), install a CUDA build of torch, or use device 'auto'",
        )
    if choice == "cpu" or num_cuda == 0 or (choice == "auto" and virtual):
        return torch.device("cpu")
    return torch.device("cuda", 0)


def configure_torch(device: torch.device, num_threads: int, *, deterministic: bool = True) -> None:
    """Set the number of threads and, on CUDA with `deterministic`, kernels that are; operations without one raise.

    `warn_only` would leave attention with a faster, non-deterministic backward. cuBLAS reads its workspace
    setting at first use. Autograd then runs in the calling thread, as on a CPU, so that gradients are accumulated in
    one order.
    """
    torch.set_num_threads(num_threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(deterministic)
        torch.autograd.set_multithreading_enabled(not deterministic)
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.utils.deterministic.fill_uninitialized_memory = False  # nothing reads it before a write


def synchronize(device: torch.device) -> None:
    """Wait for the current stream of `device`, so that timers measure the kernels; other streams go on."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def supported_backends(device: torch.device) -> tuple[str, ...]:
    """Return the torch backends that can send tensors of a stage on `device`."""
    if device.type == "cuda" and dist.is_nccl_available():
        return (*HOST_BACKENDS, "nccl")
    return HOST_BACKENDS


def device_name(device: torch.device) -> str:
    """Return the device's display name, such as `cuda:0 (NVIDIA H100)`; empty for the CPU."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
