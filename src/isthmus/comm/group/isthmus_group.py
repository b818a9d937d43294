"""`IsthmusGroup`: a torch.distributed process group over a `Transport`, with gloo inside a cluster.

Point-to-point operations between ranks of one cluster use gloo, all others the transport. Collectives are
for small tensors (a scalar, the gradient of a tied embedding): every rank sends its tensor to every other
and reduces in rank order, so that all ranks get identical bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from isthmus.comm.group.gloo_group import join_gloo_group
from isthmus.comm.group.group_work import (
    CollectiveWork,
    GlooWork,
    ReceiveWork,
    SendWork,
    gloo_error_text,
    tensor_bytes,
    tensor_label,
)
from isthmus.comm.transport.transport import Transport
from isthmus.core.errors import PeerError, PlanError

BACKEND = "isthmus"
MAX_TAG = 2**20
"""User tags are below this value, tags of collectives at or above it."""

LOSS_REPORT_WAIT_S = 1.0
"""How long to wait, after a gloo error, for the transport to report the loss behind it."""

_REDUCE_FUNCTIONS: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


@dataclass(frozen=True)
class IsthmusOptions:
    """`pg_options` of `init_process_group("isthmus", pg_options=...)`."""

    transport: Transport
    clusters: tuple[str, ...]
    """Cluster of each rank."""
    host: str = "127.0.0.1"
    """This rank's address inside its cluster."""


class IsthmusGroup(dist.ProcessGroup):  # type: ignore[misc]
    """The group of all ranks of a run; `local` is the gloo group of this cluster, None for a single rank.

    A lost peer surfaces at `wait()` as `PeerError`. Point-to-point works over the transport report when the
    message was `under_way`.
    """

    def __init__(
        self, transport: Transport, clusters: Sequence[str], local: dist.ProcessGroupGloo | None = None
    ) -> None:
        super().__init__(transport.rank, transport.size)
        self._transport, self._local = transport, local
        mine = clusters[transport.rank]
        local_ranks = [rank for rank, cluster in enumerate(clusters) if cluster == mine]
        self._local_ranks = {rank: place for place, rank in enumerate(local_ranks)} if local is not None else {}
        self._collectives = ThreadPoolExecutor(1, thread_name_prefix="isthmus-collective")
        self._sequence = 0

    @property
    def transport(self) -> Transport:
        """The underlying transport."""
        return self._transport

    def getBackendName(self) -> str:  # noqa: N802 - the name is torch's
        """Return the name under which the backend is registered."""
        return BACKEND

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> dist.Work:
        """Send one CPU tensor of any shape to rank `dst`; do not change it until the work is done."""
        return self._send(_single_cpu_tensor(tensors), dst, _check_user_tag(tag))

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> dist.Work:
        """Receive one CPU tensor from rank `src`; shape and dtype must match the sent one."""
        return self._receive(_single_cpu_tensor(tensors), src, _check_user_tag(tag))

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Reduce one tensor in place over all ranks (sum, max or min), in rank order; shapes must match."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        reduce = next((function for known, function in _REDUCE_FUNCTIONS.items() if op == known), None)
        if reduce is None:
            raise PlanError(f"the isthmus process group cannot reduce by {op}", hint="use SUM, MAX or MIN")
        tensor = _single_cpu_tensor(tensors)

        def run(tag: int) -> None:
            parts = self._gather_all(tensor, tag)
            total = parts[0].clone()
            for part in parts[1:]:
                total = reduce(total, part)
            tensor.copy_(total)

        return self._submit_collective("allreduce", run, [tensor])

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        """Copy the tensor of rank `opts.rootRank` to every rank, in place; shapes must match."""
        tensor, root = _single_cpu_tensor(tensors), opts.rootRank

        def run(tag: int) -> None:
            if self.rank() == root:
                for work in [self._send(tensor, peer, tag) for peer in self._peers()]:
                    work.wait()
            else:
                self._receive(tensor, root, tag).wait()

        return self._submit_collective("broadcast", run, [tensor])

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Fill `outputs[0][r]` with `inputs[0]` of rank `r`; all have the same shape."""
        del opts
        tensor = _single_cpu_tensor(inputs)

        def run(tag: int) -> None:
            for output, part in zip(outputs[0], self._gather_all(tensor, tag), strict=True):
                output.copy_(part)

        return self._submit_collective("allgather", run, outputs[0])

    def barrier(self, opts: Any = None) -> dist.Work:
        """Complete when every rank has called it."""
        del opts
        return self._submit_collective("barrier", lambda tag: self._gather_all(torch.zeros(1), tag), [])

    def shutdown(self) -> None:
        """Finish running collectives, then close the transport."""
        self._collectives.shutdown(wait=True)
        self._transport.close()

    def close_with_error(self, reason: str) -> None:
        """Close the transport with the failure `reason` and cancel collectives."""
        self._transport.close(reason)
        self._collectives.shutdown(wait=False, cancel_futures=True)

    def _peers(self) -> list[int]:
        return [rank for rank in range(self.size()) if rank != self.rank()]

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        what = f"send to rank {peer} (tag {tag})"
        if self._local is not None and peer in self._local_ranks:
            with self._gloo_errors_as_peer_errors(what):
                work = self._local.send([tensor.contiguous()], self._local_ranks[peer], tag)
            return GlooWork(work, what, self._loss_message, tensor)
        payload = tensor_bytes(tensor.contiguous())
        return SendWork(self._transport.send(peer, tag, tensor_label(tensor), payload), what, tensor)

    def _receive(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        what = f"receive from rank {peer} (tag {tag})"
        target = tensor if tensor.is_contiguous() else tensor.contiguous()
        if self._local is not None and peer in self._local_ranks:
            with self._gloo_errors_as_peer_errors(what):
                work = self._local.recv([target], self._local_ranks[peer], tag)
            return GlooWork(work, what, self._loss_message, tensor, target)
        future = self._transport.receive(peer, tag, tensor_label(target), tensor_bytes(target))
        return ReceiveWork(future, what, tensor, target)

    @contextmanager
    def _gloo_errors_as_peer_errors(self, operation: str) -> Iterator[None]:
        """Raise gloo's `RuntimeError` as `PeerError`."""
        try:
            yield
        except RuntimeError as error:
            raise PeerError(f"{operation}: {self._loss_message() or gloo_error_text(error)}") from error

    def _loss_message(self) -> str:
        loss = self._transport.loss(LOSS_REPORT_WAIT_S)
        return loss.message if loss else ""

    def _gather_all(self, tensor: torch.Tensor, tag: int) -> list[torch.Tensor]:
        """Return the tensors of all ranks, in rank order.

        Sends a copy and does not wait for sends to other clusters, which take a round trip to be
        acknowledged.
        """
        sent = tensor.clone()
        parts = [tensor if rank == self.rank() else torch.empty_like(tensor) for rank in range(self.size())]
        works = [self._receive(parts[peer], peer, tag) for peer in self._peers()]
        works += [self._send(sent, peer, tag) for peer in self._peers()]
        for work in works:
            if not isinstance(work, SendWork) or work.is_completed():
                work.wait()
        return parts

    def _submit_collective(self, name: str, run: Callable[[int], object], tensors: list[torch.Tensor]) -> dist.Work:
        tag = MAX_TAG + self._sequence % MAX_TAG
        self._sequence += 1
        return CollectiveWork(self._collectives.submit(run, tag), name, tensors)


def _single_cpu_tensor(tensors: list[torch.Tensor]) -> torch.Tensor:
    if len(tensors) != 1 or tensors[0].device.type != "cpu":
        raise PlanError(
            "the isthmus process group takes one CPU tensor at a time",
            hint="move the tensor to the CPU, or use the chip vendor's backend",
        )
    return tensors[0]


def _check_user_tag(tag: int) -> int:
    if not 0 <= tag < MAX_TAG:
        raise PlanError(f"tag {tag} is outside 0 .. {MAX_TAG - 1}")
    return tag


def create_group(options: Any, group_options: IsthmusOptions | None) -> IsthmusGroup:
    """Create the group for `init_process_group`; raise `PlanError` unless `group_options` is an `IsthmusOptions`."""
    if not isinstance(group_options, IsthmusOptions):
        raise PlanError(
            "the isthmus process group needs pg_options=IsthmusOptions(...)",
            hint="sub-groups are not supported by this backend",
        )
    timeout: timedelta = options.timeout
    local = join_gloo_group(group_options.transport, group_options.clusters, group_options.host, timeout)
    return IsthmusGroup(group_options.transport, group_options.clusters, local)


def register_backend() -> None:
    """Register `"isthmus"` with torch.distributed; idempotent."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, create_group, extended_api=True, devices=["cpu"])
