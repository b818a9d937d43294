"""`join_torch_group`: joins a default process group of torch itself, such as gloo or NCCL."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from isthmus.comm.group.group_work import gloo_error_text
from isthmus.core.errors import PeerError
from isthmus.core.messages.agent_messages import WorkerAddress
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.train.communication.torch_device import HOST_BACKENDS

GROUP_TIMEOUT = timedelta(hours=1)
"""Longest wait inside a group: the longest a stage may compute; lost peers are detected much sooner."""


def join_torch_group(
    spec: WorkerSpec, workers: list[WorkerAddress], listener: socket.socket, device: torch.device
) -> None:
    """Join the process group; rank 0 serves its store at the port of its check-in.

    Raises `PeerError` if a rank does not join in time.
    """
    first, timeout = workers[0], timedelta(seconds=spec.rendezvous_timeout_s)
    serving = spec.rank == 0
    try:
        store = dist.TCPStore(
            first.host,
            first.port,
            None,
            serving,
            timeout,
            wait_for_workers=False,
            master_listen_fd=socket.dup(listener.fileno()) if serving else None,
        )
        dist.init_process_group(
            spec.backend,
            store=store,
            rank=spec.rank,
            world_size=len(workers),
            timeout=GROUP_TIMEOUT,
            device_id=None if spec.backend in HOST_BACKENDS else device,
        )
    except RuntimeError as error:
        reason = gloo_error_text(error)
        raise PeerError(f"rank {spec.rank} could not join the {spec.backend} group: {reason}") from error
