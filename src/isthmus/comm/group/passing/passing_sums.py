"""`PassingSums`: PASSING as an `AllReduceMethod`: sums inside each cluster, their shares by switches, then a gather.

Source: section 4.2 of the PASSING paper, where a host is a cluster of the group. A cluster sends each element to the
switches once, whatever the number of its ranks: as many ranks as the smallest cluster has lead a share each.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from isthmus.comm.group.collective_runner import CollectiveTurn
from isthmus.comm.group.collective_work import CollectiveWork
from isthmus.comm.group.group_work import tensor_label
from isthmus.comm.group.host_tensors import HostTensors
from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.group.passing.passing_loop import PassingLoop
from isthmus.comm.group.reduce_operation import ReduceOperation
from isthmus.comm.group.run_program import run_program
from isthmus.comm.group.transport_messages import TransportMessages, sends_of
from isthmus.core.errors import PlanError
from isthmus.strategies import Message, RankProgram, Region, plan_steps, rank_program
from isthmus.switch import MAX_WORKERS, PassingPhase, PassingWorker, StreamSettings, job_number
from isthmus.wan import UdpSocket

PIECE_ELEMENTS = 2**18

_REDUCE, _GATHER, _RUN, _PHASES = 0, 1, 2, 3
"""Offsets of the numbers of a sum's collectives; one for each `PassingPhase` follows."""

NUM_SEQUENCES = _PHASES + len(PassingPhase)
"""Numbers of collectives that a sum uses."""


@dataclass(frozen=True, kw_only=True)
class PassingOptions:
    """Options of PASSING, equal at all ranks but for `host`; without `switches`, sums are by parameter servers."""

    switches: tuple[tuple[str, int], ...] = ()
    """Host and UDP port of each `isthmus switch`."""
    job: str = "job"
    """Name under which the switches know the key."""
    key: bytes = field(default=b"", repr=False)
    """Key of the job; empty for switches on loopback without keys."""
    host: str = "127.0.0.1"
    """This rank's address towards the switches."""
    slots: int = 64
    """Slots to ask for, for each share."""
    part_integers: int = 256
    silence_s: float = 2.0
    """A switch is left that sends nothing for this long while a worker waits for it."""
    open_socket: Callable[[str], UdpSocket] = UdpSocket


class PassingSums:
    """Sums and averages of float32 over the clusters of `group`, by integers of the largest scale that cannot overflow.

    Use it by `group.use_method(PassingSums(group, options))` at all ranks, or for all groups by
    `IsthmusOptions(method=partial(PassingSums, options=options))`. A sum ends with equal bits at all ranks or with a
    `PeerError` at all that are left; its error is `FixedPoint.error_bound`. `ranks` of the group sum (default: all);
    others neither make one nor call it. Raises `PlanError` for more clusters than a switch sums for, or a switch whose
    name is unknown.
    """

    def __init__(self, group: IsthmusGroup, options: PassingOptions, ranks: Sequence[int] | None = None) -> None:
        self._runner, self._rank, self._options = group.runner, group.rank(), options
        names = [group.clusters[one] for one in group.ranks]
        self._ranks = tuple(range(len(names)) if ranks is None else ranks)
        near: dict[str, list[int]] = {}
        for rank in self._ranks:
            near.setdefault(names[rank], []).append(rank)
        if len(near) > MAX_WORKERS:
            raise PlanError(f"{len(near)} clusters", hint=f"a switch sums for at most {MAX_WORKERS}")
        self._clusters = tuple(names)
        self._num_clusters = len(near)
        self._num_shares = min(len(ranks) for ranks in near.values())
        self._worker = list(near).index(names[self._rank])
        self._near = tuple(near[names[self._rank]])
        place = self._near.index(self._rank)
        self._share = place if place < self._num_shares else None
        self._leaders = [] if self._share is None else [ranks[self._share] for ranks in near.values()]
        self._switches = [_resolve(host, port) for host, port in options.switches]
        self._loop: PassingLoop | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="isthmus-passing")

    def takes(self, tensor: torch.Tensor, operation: ReduceOperation) -> bool:
        """Return whether `tensor` is float32 and `operation` adds, over more than one cluster."""
        return tensor.dtype == torch.float32 and operation.adds and self._num_clusters > 1

    def sent_bytes(self, num_elements: int) -> int:
        """Return the bytes of values that this rank sends to switches in a sum of `num_elements`, without losses."""
        if self._share is None:
            return 0
        length = -(-num_elements // self._num_shares)
        return 4 * max(min(length, num_elements - self._share * length), 0)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        operation: ReduceOperation,
        timeout_s: float | None = None,
        sequence: int | None = None,
    ) -> CollectiveWork:
        """Reduce `tensor`, of any shape, in place; NaN and infinity fail every rank.

        `sequence` is the first of `NUM_SEQUENCES` numbers that all ranks of the group have reserved.
        """
        host = HostTensors([tensor], read=True)
        (flat,) = host.flat
        label = f"allreduce {operation.name} {tensor_label(tensor)} by passing"

        def run(turn: CollectiveTurn) -> None:
            several: list[TransportMessages] = []
            with self._runner.failing(several):
                turn.wait_for_earlier()
                host.synchronize()
                self._sum(flat, label, turn, several)
                operation.finish(flat, len(self._ranks))
                host.store()

        future = self._runner.submit_run(run, self._thread, [tensor], timeout_s, NUM_SEQUENCES, sequence)
        return CollectiveWork(future, "allreduce", [tensor])

    @property
    def worker(self) -> PassingWorker | None:
        """The worker of this rank's share, with its counters; None before the first sum, or without a share."""
        return None if self._loop is None else self._loop.worker

    def close(self, *, wait: bool) -> None:
        """Stop the thread, and free the slots."""
        self._thread.shutdown(wait=True, cancel_futures=not wait)
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def _sum(self, flat: torch.Tensor, label: str, turn: CollectiveTurn, several: list[TransportMessages]) -> None:
        scatter, gather, spans = _programs(flat.numel(), self._clusters, self._near, self._rank, self._num_shares)

        def messages(offset: int, owed: Sequence[Message]) -> TransportMessages:
            made = self._runner.messages(turn.sequence + offset, f"{label} {offset}", owed, turn.limit_s)
            several.append(made)
            return made

        reducing, gathering = messages(_REDUCE, sends_of(scatter)), messages(_GATHER, sends_of(gather))
        peers = [Message(rank, 0) for rank in self._leaders if rank != self._rank]
        votes = messages(_PHASES + PassingPhase.VOTE, peers)
        span = None if self._share is None else spans[self._share]
        if span is None:
            run_program(scatter, [(0, flat)], [], torch.add, reducing)
            run_program(gather, [], [(0, flat)], None, gathering)
            return
        start, stop = span
        part = torch.empty(stop - start, dtype=torch.float32)
        run_program(scatter, [(0, flat)], [(start, part)], torch.add, reducing)
        if self._loop is None:
            self._loop = self._join(messages(_RUN, peers if self._worker == 0 else []))
        phases = {PassingPhase.VOTE: votes}

        def messages_of(phase: PassingPhase) -> TransportMessages:
            if phase not in phases:
                phases[phase] = messages(_PHASES + phase, [])
            return phases[phase]

        total = torch.from_numpy(self._loop.sum(part.numpy(), messages_of, turn.limit_s))
        run_program(gather, [(start, total)], [(0, flat)], None, gathering)

    def _join(self, messages: TransportMessages) -> PassingLoop:
        """Agree with the other leaders of this share on the run, a random number of the first one."""
        number = torch.empty(8, dtype=torch.uint8)
        if self._worker == 0:
            number = torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.uint8)
            for rank in self._leaders[1:]:
                messages.send(Message(rank, 0), number)
        else:
            messages.wait(self._leaders[0], messages.receive(Message(self._leaders[0], 0), number))
        settings = StreamSettings(
            job=job_number(self._options.job),
            run=int.from_bytes(number.numpy().tobytes(), "little"),
            stream=self._share or 0,
            worker=self._worker,
            workers=len(self._leaders),
            key=self._options.key,
            slots=self._options.slots,
            part_integers=self._options.part_integers,
            silence_s=self._options.silence_s,
        )
        worker = PassingWorker(settings, len(self._switches), messages.left_s)
        return PassingLoop(worker, self._options.open_socket(self._options.host), self._switches, self._leaders)


@lru_cache(maxsize=128)
def _programs(
    num_elements: int, clusters: tuple[str, ...], near: tuple[int, ...], rank: int, num_shares: int
) -> tuple[RankProgram, RankProgram, list[tuple[int, int] | None]]:
    """Return the reduce-scatter and the all-gather of `rank` among the ranks `near`, and the range of each share."""
    length = -(-num_elements // num_shares)
    ranges = [(place * length, min((place + 1) * length, num_elements)) for place in range(num_shares)]
    spans = [one if one[0] < one[1] else None for one in ranges]
    led = [(*one, near[place]) for place, one in enumerate(spans) if one is not None]
    scatter = tuple(Region(start, stop, near, (leader,)) for start, stop, leader in led)
    gather = tuple(Region(start, stop, (leader,), near) for start, stop, leader in led)
    first, second = (rank_program(plan_steps(of, clusters, PIECE_ELEMENTS), of, rank) for of in (scatter, gather))
    return first, second, spans


def _resolve(host: str, port: int) -> tuple[str, int]:
    """Return address and port as packets name them."""
    try:
        _, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise PlanError(
            f"switch {host}:{port} is unknown: {error}", hint="state the address that `isthmus switch` prints"
        ) from error
    return str(address[0]), int(address[1])
