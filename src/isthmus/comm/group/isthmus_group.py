"""`IsthmusGroup`: a torch.distributed process group over a `Transport`, with vendors' libraries inside clusters.

torch accepts it as its own: `new_group`, `DeviceMesh`, DDP, FSDP2, HSDP and DTensor run over it. Point-to-point
operations and collectives of a group inside one cluster use the library of the chips' vendor. A group that spans
clusters executes the steps of `isthmus.strategies`, or, for sums, composes libraries and messages
(`isthmus.comm.group.composed`): each sum is taken inside the clusters first and crosses the network between them once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from isthmus.comm.group.all_reduce_method import AllReduceMethod
from isthmus.comm.group.collective_runner import MAX_TAG, Collective, CollectiveRunner
from isthmus.comm.group.collective_work import CollectiveWork, JoinedWork
from isthmus.comm.group.composed.composition import Composition
from isthmus.comm.group.composed.device_messages import DeviceMessages
from isthmus.comm.group.composed.device_program import DeviceProgram, DeviceProgramWork
from isthmus.comm.group.composed.near_messages import NearRanks
from isthmus.comm.group.group_collectives import GroupCollectives, timeout_s
from isthmus.comm.group.group_work import (
    AnySourceWork,
    GlooWork,
    ReceiveWork,
    SendWork,
    gloo_error_text,
    tensor_bytes,
    tensor_label,
)
from isthmus.comm.group.host_tensors import HostTensors
from isthmus.comm.group.reduce_operation import ReduceOperation
from isthmus.comm.group.run_program import Block, Codec, Combine
from isthmus.comm.group.vendors.gloo_vendor import GLOO
from isthmus.comm.group.vendors.join_vendors import VendorGroups
from isthmus.comm.transport.transport import Transport
from isthmus.core.errors import PeerError, PlanError
from isthmus.strategies import RankProgram

BACKEND = "isthmus"

LOSS_REPORT_WAIT_S = 1.0
"""How long to wait, after a gloo error, for the transport to report the loss behind it."""

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""That of torch's own groups."""

Lists = list[list[torch.Tensor]]
Tensors = list[torch.Tensor]


class IsthmusGroup(dist.ProcessGroup):  # type: ignore[misc]
    """The group of `ranks` of `transport` (default: all), which is rank `ranks.index(transport.rank)` of it.

    `clusters[r]` is the cluster of rank `r` of the transport; `libraries` are the vendors' groups of the group's ranks
    in this cluster, by type of device; `composition` says how sums over several clusters use them; a strategy named by
    `synchronisation` replaces it for all-reduces. Tags of the group begin at `tag_base`; `name` is the one that torch
    knows it by. Tensors may be on any device, and be changed once the work is done. A lost peer surfaces at `wait()` as
    `PeerError`. Only `senders` of the transport's ranks send collectives to other clusters, if any are given.
    Point-to-point works over the transport report when the message was `under_way`; if the program
    `names_sources` of all that it receives, or the group is inside one cluster, the library carries those in a cluster.
    `devices[r]` is the type of device that rank `r` of the transport computes on (default: the CPU at all).
    """

    def __init__(
        self,
        transport: Transport,
        clusters: Sequence[str],
        libraries: VendorGroups | None = None,
        composition: Composition | None = None,
        *,
        devices: Sequence[str] = (),
        synchronisation: str | None = None,
        names_sources: bool = False,
        senders: Sequence[int] = (),
        ranks: Sequence[int] = (),
        tag_base: int = 0,
        name: str = "",
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        self._ranks = tuple(ranks) or tuple(range(transport.size))
        if transport.rank not in self._ranks:
            raise PlanError(
                f"rank {transport.rank} is outside the group of ranks {list(self._ranks)}",
                hint="let only the ranks of a group make it and call it",
            )
        rank = self._ranks.index(transport.rank)
        super().__init__(rank, len(self._ranks))
        self._transport, self._tag_base, self._name = transport, tag_base, name
        self._clusters = tuple(clusters)
        self._runner = CollectiveRunner(transport, self._ranks, tag_base, timeout.total_seconds())
        self._loss_message = partial(_loss_message, transport)
        self._synchronisation, self._names_sources = synchronisation, names_sources
        self._senders = frozenset(place for place, one in enumerate(self._ranks) if one in senders)
        self._method: AllReduceMethod | None = None
        self._device_messages: DeviceMessages | None = None
        self.use_libraries(libraries or {}, composition, devices)

    def use_libraries(
        self, libraries: VendorGroups, composition: Composition | None, devices: Sequence[str] = ()
    ) -> None:
        """Use `libraries` and `composition` from now on; all ranks call this between the same collectives."""
        self._device_messages = self._join_devices(libraries, devices)
        own = [self._clusters[one] for one in self._ranks]
        self._library_types = frozenset(libraries) if len(set(own)) == 1 else frozenset[str]()
        near = [place for place, cluster in enumerate(own) if cluster == own[self.rank()]]
        self._local = libraries["cpu"].backend if "cpu" in libraries else None
        places = {one: place for place, one in enumerate(near)} if self._local is not None else {}
        by_gloo = self._local is not None and libraries["cpu"].vendor is GLOO
        self._near = NearRanks(self._local, places, self._loss_message) if by_gloo else None
        # The ranks whose messages with this one the library carries, and their places there.
        self._is_local = len(set(own)) == 1
        self._gloo_ranks = places if self._is_local or self._names_sources else {}
        self._collectives = GroupCollectives(
            self._runner, self.rank(), own, libraries, composition, self._loss_message, self._synchronisation,
            self._senders,
        )  # fmt: skip

    def _join_devices(self, libraries: VendorGroups, devices: Sequence[str]) -> DeviceMessages | None:
        """Return the messages to ranks of this cluster on devices like this one's, where the library carries them."""
        own = self._transport.rank
        library = libraries.get(devices[own]) if devices else None
        if library is None or not library.has_channels:
            return None
        near = [one for one in self._ranks if self._clusters[one] == self._clusters[own]]
        places = {one: place for place, one in enumerate(near) if one != own and devices[one] == devices[own]}
        return DeviceMessages(self._transport, library, places)

    @property
    def device_messages(self) -> DeviceMessages | None:
        """What carries messages between this rank's device and those of other ranks of its cluster, if anything."""
        return self._device_messages

    def has_library(self, device_type: str) -> bool:
        """Return whether a vendor's library carries collectives on devices of this type; only inside a cluster."""
        return device_type in self._library_types

    def use_method(self, method: AllReduceMethod | None) -> None:
        """All-reduce by `method` what it takes; all ranks call this between the same collectives."""
        if self._method is not None:
            self._method.close(wait=True)
        self._method = method

    @property
    def method(self) -> AllReduceMethod | None:
        """The other way to all-reduce that this group uses, if any."""
        return self._method

    @property
    def runner(self) -> CollectiveRunner:
        """What runs the collectives of this group."""
        return self._runner

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the transport, in the order of the group."""
        return self._ranks

    @property
    def transport(self) -> Transport:
        """The underlying transport."""
        return self._transport

    @property
    def clusters(self) -> tuple[str, ...]:
        """Cluster of each rank of the transport."""
        return self._clusters

    @property
    def group_name(self) -> str:
        """The name under which torch registers the group."""
        return self._name

    def getBackendName(self) -> str:  # noqa: N802 - the name is torch's
        """Return the name under which the backend is registered."""
        return BACKEND

    def getGroupName(self) -> str:  # noqa: N802 - the name is torch's
        """Return the name under which torch registers the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - the name is torch's
        """Take the name that torch gives."""
        self._name = name

    def send(self, tensors: Tensors, dst: int, tag: int) -> dist.Work:
        """Send one CPU tensor of any shape to rank `dst`; do not change it until the work is done."""
        tensor, tag = _single_cpu_tensor(tensors), _check_user_tag(tag)
        self._check_rank(dst)
        what = f"send to rank {dst} (tag {tag})"
        if self._local is not None and dst in self._gloo_ranks:
            with self._gloo_errors_as_peer_errors(what):
                work = self._local.send([tensor.contiguous()], self._gloo_ranks[dst], tag)
            return GlooWork(work, what, self._loss_message, tensor)
        payload = tensor_bytes(tensor.contiguous())
        future = self._transport.send(self._ranks[dst], self._tag_base + tag, tensor_label(tensor), payload)
        return SendWork(future, what, tensor)

    def recv(self, tensors: Tensors, src: int, tag: int) -> dist.Work:
        """Receive one CPU tensor from rank `src`; shape and dtype must match the sent one."""
        tensor, tag = _single_cpu_tensor(tensors), _check_user_tag(tag)
        self._check_rank(src)
        what = f"receive from rank {src} (tag {tag})"
        target = tensor if tensor.is_contiguous() else tensor.contiguous()
        if self._local is not None and src in self._gloo_ranks:
            with self._gloo_errors_as_peer_errors(what):
                work = self._local.recv([target], self._gloo_ranks[src], tag)
            return GlooWork(work, what, self._loss_message, tensor, target)
        peer, label = self._ranks[src], tensor_label(target)
        future = self._transport.receive(peer, self._tag_base + tag, label, tensor_bytes(target))
        return ReceiveWork(future, what, tensor, target)

    def recv_anysource(self, tensors: Tensors, tag: int) -> dist.Work:
        """Receive one CPU tensor from any rank that sends it under `tag`; shape and dtype must match the sent one."""
        tensor, tag = _single_cpu_tensor(tensors), _check_user_tag(tag)
        what = f"receive from any rank (tag {tag})"
        target = tensor if tensor.is_contiguous() else tensor.contiguous()
        others = [rank for rank in self._ranks if rank != self._transport.rank]
        if not others or (self._gloo_ranks and not self._is_local):
            raise PlanError(
                "this group has no other rank to receive from" if not others else
                "gloo carries the messages inside the clusters of this group, and it cannot leave one to the network",
                hint="pass src to dist.recv, or IsthmusOptions(names_sources=False) at all ranks",
            )  # fmt: skip
        if self._local is not None and self._is_local:
            with self._gloo_errors_as_peer_errors(what):
                work = self._local.recv_anysource([target], tag)
            return GlooWork(work, what, self._loss_message, tensor, target, list(self._gloo_ranks))
        label = tensor_label(target)
        future = self._transport.receive_any(others, self._tag_base + tag, label, tensor_bytes(target))
        return AnySourceWork(future, what, tensor, target, self._ranks)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce each tensor in place over all ranks, to the same bits everywhere; shapes must match."""
        operation = _operation(opts)
        return _joined([self._all_reduce(one, operation, opts) for one in tensors])

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        """Reduce each tensor over all ranks into that of rank `opts.rootRank`; shapes must match."""
        operation = _operation(opts)
        return _joined(
            [self._collectives.reduce(one, self._check_rank(opts.rootRank), operation, opts) for one in tensors]
        )

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        """Copy each tensor of rank `opts.rootRank` to every rank, in place; shapes must match."""
        return _joined([self._collectives.broadcast(one, self._check_rank(opts.rootRank), opts) for one in tensors])

    def allgather(self, outputs: Lists, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Fill `outputs[i][r]` with `inputs[i]` of rank `r`; sizes may differ between ranks."""
        pairs = zip(outputs, inputs, strict=True)
        return _joined([self._collectives.all_gather(parts, one, opts) for parts, one in pairs])

    def allgather_coalesced(self, outputs: Lists, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Fill `outputs[r][i]` with `inputs[i]` of rank `r`: the lists of torch are by rank here."""
        return self.allgather([list(parts) for parts in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> dist.Work:
        """Fill `output` [ranks * N] with the tensors [N] of all ranks, one after the other."""
        return self._collectives.all_gather_single(output, tensor, opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Fill `outputs[i]` with `inputs[i]` of all ranks."""
        pairs = zip(outputs, inputs, strict=True)
        return _joined([self._collectives.all_gather_single(output, one, opts) for output, one in pairs])

    def reduce_scatter(self, outputs: Tensors, inputs: Lists, opts: Any = None) -> dist.Work:
        """Reduce `inputs[i][r]` over all ranks into `outputs[i]` of rank `r`; sizes may differ between ranks."""
        operation, pairs = _operation(opts), zip(outputs, inputs, strict=True)
        return _joined([self._collectives.reduce_scatter(output, parts, operation, opts) for output, parts in pairs])

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> dist.Work:
        """Reduce the blocks of `tensor` [ranks * N], one per rank, each into the output [N] of its rank."""
        return self._collectives.reduce_scatter_single(output, tensor, _operation(opts), opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Reduce equal blocks of `inputs[i]`, one per rank, each into `outputs[i]` of its rank."""
        pairs = zip(outputs, inputs, strict=True)
        return _joined([self.reduce_scatter_single(output, one, opts) for output, one in pairs])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Send `inputs[d]` to rank `d`, and receive `outputs[s]` from rank `s`."""
        return self._collectives.all_to_all(outputs, inputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        opts: Any = None,
    ) -> dist.Work:
        """Send rows of `tensor`, `input_splits[d]` to rank `d`, and receive `output_splits[s]` from rank `s`.

        Without splits, each rank has an equal number of rows.
        """
        if not output.is_contiguous():
            raise PlanError("the output of all_to_all_single must be contiguous")
        outputs, inputs = _rows(output, output_splits, self.size()), _rows(tensor, input_splits, self.size())
        return self._collectives.all_to_all(outputs, inputs, opts)

    def gather(self, outputs: Lists, inputs: Tensors, opts: Any) -> dist.Work:
        """Fill `outputs[0][r]` of rank `opts.rootRank` with `inputs[0]` of rank `r`."""
        return self._collectives.gather(outputs[0] if outputs else [], inputs[0], self._check_rank(opts.rootRank), opts)

    def scatter(self, outputs: Tensors, inputs: Lists, opts: Any) -> dist.Work:
        """Fill `outputs[0]` of rank `r` with `inputs[0][r]` of rank `opts.rootRank`."""
        return self._collectives.scatter(outputs[0], inputs[0] if inputs else [], self._check_rank(opts.rootRank), opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Complete when every rank has called it."""
        return self._collectives.barrier(opts)

    def _all_reduce(self, tensor: torch.Tensor, operation: ReduceOperation, opts: Any) -> dist.Work:
        if self._method is not None and tensor.numel() and self._method.takes(tensor, operation):
            return self._method.all_reduce(tensor, operation, timeout_s(opts))
        return self._collectives.all_reduce(tensor, operation, opts)

    def reserve_programs(self, num: int) -> int:
        """Return the first number of `num` programs for `execute`; all ranks call this in one order with one `num`."""
        return self._runner.reserve(num)

    def execute(
        self,
        number: int,
        label: str,
        program: RankProgram,
        inputs: Sequence[Block],
        outputs: Sequence[Block],
        combine: Combine | None,
        codec: Codec | None = None,
    ) -> CollectiveWork:
        """Execute `program`, the part of this rank in steps of `isthmus.strategies`, as collective `number`.

        Ranks without a part do not call this. The flat tensors [N] of `inputs` and `outputs`, on any device, share no
        memory and are never changed by the caller afterwards. Gloo carries large messages inside a cluster; `codec`, an
        equal one at all ranks, encodes those between clusters. Tensors of a device stay there inside a cluster, where
        its library carries messages.
        """
        near, tensors = self._device_messages, [tensor for _, tensor in (*inputs, *outputs)]
        if near is not None and tensors and all(map(near.memory.owns, tensors)):
            one = DeviceProgram(near, self._ranks, f"{label} #{number}", program, inputs, outputs, combine, codec)
            done = self._runner.submit_program(one.run, label, one.owed, number)
            return DeviceProgramWork(done, label, [tensor for _, tensor in outputs], one)
        sent, got = (
            HostTensors([tensor for _, tensor in blocks], read=blocks is inputs) for blocks in (inputs, outputs)
        )
        ins, outs = (
            [(start, flat) for (start, _), flat in zip(blocks, host.flat, strict=True)]
            for blocks, host in ((inputs, sent), (outputs, got))
        )
        collective = Collective(
            label,
            program,
            ins,
            outs,
            (),
            combine,
            keeps_memory=True,
            near=self._near,
            codec=codec,
            prepare=sent.synchronize,
            finish=got.store,
        )
        future = self._runner.submit(collective, sequence=number)
        return CollectiveWork(future, label, [tensor for _, tensor in outputs])

    def set_timeout(self, timeout: timedelta) -> None:
        """Limit later collectives to `timeout`."""
        self._runner.timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """Finish running collectives; the group of all ranks then closes the transport."""
        self.use_method(None)
        self._collectives.close(wait=True)
        self._runner.close(wait=True)
        self._close_devices()
        if self._tag_base == 0:
            self._transport.close()

    def close_with_error(self, reason: str) -> None:
        """Close the transport with the failure `reason` and cancel collectives."""
        self._transport.close(reason)
        if self._method is not None:
            self._method.close(wait=False)
        self._collectives.close(wait=False)
        self._runner.close(wait=False)
        self._close_devices()

    def _close_devices(self) -> None:
        if self._device_messages is not None:
            self._device_messages.close()

    def abort(self) -> None:
        """End the group at once; operations that wait fail, at the other ranks too."""
        self.close_with_error("the process group is aborted")

    def _check_rank(self, rank: int) -> int:
        if not 0 <= rank < self.size():
            raise PlanError(
                f"rank {rank} is outside this group of {self.size()} ranks", hint="pass a rank of the group"
            )
        return int(rank)

    @contextmanager
    def _gloo_errors_as_peer_errors(self, operation: str) -> Iterator[None]:
        """Raise gloo's `RuntimeError` as `PeerError`."""
        try:
            yield
        except RuntimeError as error:
            raise PeerError(f"{operation}: {self._loss_message() or gloo_error_text(error)}") from error


def _loss_message(transport: Transport) -> str:
    loss = transport.loss(LOSS_REPORT_WAIT_S)
    return loss.message if loss else ""


def _operation(opts: Any) -> ReduceOperation:
    return ReduceOperation.of(dist.ReduceOp.SUM if opts is None else opts.reduceOp)


def _joined(works: Sequence[dist.Work]) -> dist.Work:
    return works[0] if len(works) == 1 else JoinedWork(works)


def _rows(tensor: torch.Tensor, splits: Sequence[int] | None, size: int) -> list[torch.Tensor]:
    """Return the rows of `tensor` for each rank; raises `PlanError` if they do not fit."""
    rows = tensor.shape[0] if tensor.ndim else 0
    if splits and (sum(splits) != rows or len(splits) != size or min(splits) < 0):
        raise PlanError(f"splits {list(splits)} do not cut {rows} rows for {size} ranks")
    if not splits and rows % size:
        raise PlanError(f"{rows} rows do not divide by {size} ranks", hint="state the splits")
    return list(tensor.detach().split(list(splits) if splits else [rows // size] * size))


def _single_cpu_tensor(tensors: Tensors) -> torch.Tensor:
    if len(tensors) != 1 or tensors[0].device.type != "cpu":
        raise PlanError(
            "the isthmus process group sends one CPU tensor at a time",
            hint="move the tensor to the CPU, or use the chip vendor's backend",
        )
    return tensors[0]


def _check_user_tag(tag: int) -> int:
    if not 0 <= tag < MAX_TAG:
        raise PlanError(f"tag {tag} is outside 0 .. {MAX_TAG - 1}")
    return tag
