"""`FormattedSums`: all-reduce whose messages between clusters have a wire format; an `AllReduceMethod`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
import torch.distributed as dist

from isthmus.comm.group.cluster_codec import ClusterCodec
from isthmus.comm.group.collective_runner import CollectiveTurn
from isthmus.comm.group.collective_work import CollectiveWork
from isthmus.comm.group.group_work import tensor_label
from isthmus.comm.group.host_tensors import HostTensors
from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.group.reduce_operation import ReduceOperation
from isthmus.comm.group.run_program import run_program
from isthmus.comm.group.transport_messages import sends_of
from isthmus.comm.wire_formats.error_feedback import ErrorFeedback
from isthmus.comm.wire_formats.known_formats import WIRE_FORMATS
from isthmus.core.errors import PlanError
from isthmus.strategies import RankProgram, plan_steps, rank_program, regions

PIECE_ELEMENTS = 2**18
MAX_CONCURRENT = 4


class FormattedSums:
    """Sums and averages of float32 over several clusters of `group`, in wire format `name`, which all ranks state.

    A value that is sent to another cluster is replaced by what its receivers decode, so all ranks end with equal bits.
    An all-reduce rounds each cluster's sum once, and the total once. Raises `PlanError` for an unknown name.
    """

    def __init__(self, group: IsthmusGroup, name: str) -> None:
        if name not in WIRE_FORMATS:
            raise PlanError(f"unknown wire format {name!r}", hint=f"available: {', '.join(WIRE_FORMATS)}")
        self._format = WIRE_FORMATS[name]
        self._runner, self._rank = group.runner, group.rank()
        self._clusters = tuple(group.clusters[one] for one in group.ranks)
        self._pool = ThreadPoolExecutor(MAX_CONCURRENT, thread_name_prefix="isthmus-formatted")

    def takes(self, tensor: torch.Tensor, operation: ReduceOperation) -> bool:
        """Return whether `tensor` is float32 and `operation` adds, over more than one cluster."""
        return tensor.dtype == torch.float32 and operation.adds and len(set(self._clusters)) > 1

    def all_reduce(
        self,
        tensor: torch.Tensor,
        operation: ReduceOperation,
        timeout_s: float | None = None,
        feedback: ErrorFeedback | None = None,
    ) -> dist.Work:
        """Reduce `tensor`, of any shape, in place; `feedback` is that of this tensor or bucket, at every rank.

        NaN and infinity fail every rank under a scaled format.
        """
        host = HostTensors([tensor], read=True)
        (flat,) = host.flat
        piece = max(min(flat.numel() // (4 * len(self._clusters)), PIECE_ELEMENTS), 2**14)
        program = _program(flat.numel(), self._clusters, self._rank, piece)
        label = f"allreduce {operation.name} {tensor_label(tensor)} in {self._format.name}"

        def run(turn: CollectiveTurn) -> None:
            messages = self._runner.messages(turn.sequence, label, sends_of(program), turn.limit_s)
            with self._runner.failing([messages]):
                turn.wait_for_earlier()
                host.synchronize()
                codec = ClusterCodec(self._format, self._clusters, self._rank, feedback)
                run_program(program, [(0, flat)], [(0, flat)], operation.combine, messages, codec=codec)
                operation.finish(flat, len(self._clusters))
                host.store()

        return CollectiveWork(self._runner.submit_run(run, self._pool, [tensor], timeout_s), "allreduce", [tensor])

    def close(self, *, wait: bool) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=wait, cancel_futures=not wait)


@lru_cache(maxsize=128)
def _program(num_elements: int, clusters: tuple[str, ...], rank: int, piece_elements: int) -> RankProgram:
    of = regions.all_reduce(num_elements, len(clusters))
    return rank_program(plan_steps(of, clusters, piece_elements), of, rank)
