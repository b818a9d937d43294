"""`IbverbsDevice`: an RDMA card through libibverbs, over InfiniBand or RoCE; `open_card` finds one."""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import threading
from ctypes import byref, c_int, c_void_p
from pathlib import Path
from typing import Any

from isthmus.comm.rdma.ibverbs_library import (
    AddressHandle,
    Operations,
    PortState,
    QueuePairCapacity,
    QueuePairChange,
    QueuePairSetup,
    ReceiveWork,
    Segment,
    SendWork,
    WorkCompletion,
    load_library,
)
from isthmus.comm.rdma.verbs import Completion, PairRecord
from isthmus.core.errors import InputError

_SYSFS = Path("/sys/class/infiniband")
_PORT = 1
_ACTIVE, _ETHERNET = 4, 2
_LOCAL_WRITE, _REMOTE_WRITE = 1, 2
_RELIABLE = 2
_INIT, _READY_TO_RECEIVE, _READY_TO_SEND = 1, 2, 3
_TO_INIT = 1 << 0 | 1 << 3 | 1 << 4 | 1 << 5
_TO_RECEIVE = 1 << 0 | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 17 | 1 << 15 | 1 << 20
_TO_SEND = 1 << 0 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 16 | 1 << 13
"""Masks of `enum ibv_qp_attr_mask`: what each change of state sets."""
_WRITE_WITH_IMMEDIATE, _SEND = 1, 2
_SIGNALED = 2
_RECEIVED, _WRITTEN = 128, 129
_RNR_TIMER, _TIMEOUT, _RETRIES, _FOREVER = 12, 14, 7, 7
"""0.64 ms; 67 ms for each of 7 tries; receives are always posted, so a peer that is not ready is only late."""
_HOP_LIMIT = 64


def open_card(name: str = "", number: int = 0, library: str = "libibverbs.so.1", sysfs: Path = _SYSFS) -> IbverbsDevice:
    """Return the card `name`, or of all usable ones that of `number`, modulo how many there are.

    Raises `InputError` without the library, the card, or an active port.
    """
    host = socket.gethostname()
    hint = "set `transport: rdma` only between clusters whose nodes have RDMA cards; `ibv_devinfo` lists them"
    try:
        verbs = load_library(library)
    except OSError as error:
        raise InputError(
            f"no RDMA on {host}: {error}", hint="install rdma-core (libibverbs.so.1) on each node; " + hint
        ) from error
    usable, unusable = list[IbverbsDevice](), list[str]()
    count = c_int()
    devices = verbs.ibv_get_device_list(byref(count))
    for at in range(count.value if devices else 0):
        known = verbs.ibv_get_device_name(devices[at]).decode()
        try:
            usable.append(IbverbsDevice(verbs, devices[at], known, sysfs))
        except OSError as error:
            unusable.append(f"{known} ({error.strerror})")
    if devices:
        verbs.ibv_free_device_list(devices)
    wanted = [one for one in usable if name in ("", one.name)]
    chosen = wanted[number % len(wanted)] if wanted else None
    for one in usable:
        if one is not chosen:
            one.close()
    if chosen is not None:
        return chosen
    known = ", ".join([one.name for one in usable] + unusable)
    if not known:
        raise InputError(f"no RDMA device on {host} (ibv_devices lists none)", hint=hint)
    raise InputError(f"no usable RDMA device {name or 'at all'} on {host}; there are: {known}", hint=hint)


class IbverbsDevice:
    """The first port of a card, described in `sysfs`. Raises `OSError` if it is not active or may not be used."""

    def __init__(self, verbs: ctypes.CDLL, device: int, name: str, sysfs: Path) -> None:
        self.verbs, self.name = verbs, name
        self.context = _check(verbs.ibv_open_device(device), "ibv_open_device")
        try:
            self.port = PortState()
            _check_zero(verbs.ibv_query_port(self.context, _PORT, byref(self.port)), "ibv_query_port")
            if self.port.state != _ACTIVE:
                raise OSError(0, "its port is not active")
            self.operations = Operations(self.context.contents)
            self.gid_index = _gid_index(sysfs / name, self.port.link_layer == _ETHERNET)
            gid = (ctypes.c_ubyte * 16)()
            _check_zero(verbs.ibv_query_gid(self.context, _PORT, self.gid_index, gid), "ibv_query_gid")
            self.gid = bytes(gid)
            self.domain = _check(verbs.ibv_alloc_pd(self.context), "ibv_alloc_pd")
        except OSError:
            verbs.ibv_close_device(self.context)
            raise

    def close(self) -> None:
        """Close the device; its pairs are closed."""
        self.verbs.ibv_dealloc_pd(self.domain)
        self.verbs.ibv_close_device(self.context)

    def open_pair(self, memory: memoryview, region_offset: int, region_bytes: int, depth: int) -> IbverbsPair:
        """Return a new pair; see `VerbsDevice`."""
        return IbverbsPair(self, memory, region_offset, region_bytes, depth)


class IbverbsPair:
    """A reliable connection of a card; a `VerbsPair`. Registration pins its memory."""

    def __init__(
        self, device: IbverbsDevice, memory: memoryview, region_offset: int, region_bytes: int, depth: int
    ) -> None:
        self._device, self._verbs, self._ops = device, device.verbs, device.operations
        self._lock, self._key = threading.Lock(), 0
        self._made: list[tuple[str, Any]] = []
        try:
            exported = (ctypes.c_char * len(memory)).from_buffer(memory)
            self._start = ctypes.addressof(exported)
            access = _LOCAL_WRITE | _REMOTE_WRITE
            local = self._make("ibv_reg_mr", "ibv_dereg_mr", device.domain, self._start, len(memory), _LOCAL_WRITE)
            place = self._start + region_offset
            remote = self._make("ibv_reg_mr", "ibv_dereg_mr", device.domain, place, region_bytes, access)
            self._local_key = local.contents.lkey
            self._channel = self._make("ibv_create_comp_channel", "ibv_destroy_comp_channel", device.context)
            size = 2 * depth
            self._queue = self._make("ibv_create_cq", "ibv_destroy_cq", device.context, size, None, self._channel, 0)
            capacity = QueuePairCapacity(depth, depth, 1, 1, 0)
            setup = QueuePairSetup(None, self._queue, self._queue, None, capacity, _RELIABLE, 1)
            self._pair = self._make("ibv_create_qp", "ibv_destroy_qp", device.domain, byref(setup))
            self._change(QueuePairChange(qp_state=_INIT, port_num=_PORT, qp_access_flags=_REMOTE_WRITE), _TO_INIT)
            os.set_blocking(self._channel.contents.fd, False)
            _check_zero(self._ops.req_notify_cq(self._queue, 0), "ibv_req_notify_cq")
        except OSError:
            self.close()
            raise
        number, psn = self._pair.contents.qp_num, secrets.randbelow(2**24)
        port = device.port
        local_id = 0 if port.link_layer == _ETHERNET else port.lid
        self.record = PairRecord(
            device.gid, local_id, number, psn, port.active_mtu, region_bytes, place, remote.contents.rkey
        )

    def connect(self, peer: PairRecord) -> None:
        """Bring the pair to its state of sending; see `VerbsPair`."""
        self._key = peer.key
        way = AddressHandle(
            sgid_index=self._device.gid_index, hop_limit=_HOP_LIMIT, dlid=peer.local_id, is_global=1, port_num=_PORT
        )
        ctypes.memmove(way.dgid, peer.gid, len(peer.gid))
        self._change(
            QueuePairChange(
                qp_state=_READY_TO_RECEIVE, path_mtu=min(self.record.mtu_code, peer.mtu_code), rq_psn=peer.first_psn,
                dest_qp_num=peer.number, ah_attr=way, max_dest_rd_atomic=1, min_rnr_timer=_RNR_TIMER,
            ),
            _TO_RECEIVE,
        )  # fmt: skip
        self._change(
            QueuePairChange(
                qp_state=_READY_TO_SEND, sq_psn=self.record.first_psn, max_rd_atomic=1, timeout=_TIMEOUT,
                retry_cnt=_RETRIES, rnr_retry=_FOREVER,
            ),
            _TO_SEND,
        )  # fmt: skip

    def post_receive(self, number: int, offset: int, num_bytes: int) -> None:
        """Lend memory; see `VerbsPair`."""
        segment = Segment(self._start + offset, num_bytes, self._local_key)
        self._post(self._ops.post_recv, ReceiveWork(number, None, ctypes.pointer(segment), 1))

    def post_send(self, offset: int, num_bytes: int) -> None:
        """Send; see `VerbsPair`."""
        self._send(_SEND, offset, num_bytes)

    def post_write(self, offset: int, num_bytes: int, address: int, immediate: int) -> None:
        """Write; see `VerbsPair`."""
        self._send(
            _WRITE_WITH_IMMEDIATE, offset, num_bytes,
            imm_data=socket.htonl(immediate), remote_addr=address, rkey=self._key,
        )  # fmt: skip

    def fileno(self) -> int:
        """Return the descriptor of the completion channel; see `VerbsPair`."""
        return int(self._channel.contents.fd)

    def poll(self) -> list[Completion]:
        """Return completions, having asked for the next event before; see `VerbsPair`."""
        queue, context = c_void_p(), c_void_p()
        while self._verbs.ibv_get_cq_event(self._channel, byref(queue), byref(context)) == 0:
            self._verbs.ibv_ack_cq_events(self._queue, 1)
            _check_zero(self._ops.req_notify_cq(self._queue, 0), "ibv_req_notify_cq")
        found = list[Completion]()
        many = (WorkCompletion * 16)()
        while (count := self._ops.poll_cq(self._queue, len(many), many)) > 0:
            found += [self._completion(one) for one in many[:count]]
        if count < 0:
            raise OSError(-count, "ibv_poll_cq failed")
        return found

    def close(self) -> None:
        """Destroy what was made, the last first."""
        while self._made:
            name, one = self._made.pop()
            getattr(self._verbs, name)(one)

    def _make(self, name: str, undo: str, *arguments: Any) -> Any:
        one = _check(getattr(self._verbs, name)(*arguments), name)
        self._made.append((undo, one))
        return one

    def _change(self, attributes: QueuePairChange, mask: int) -> None:
        _check_zero(self._verbs.ibv_modify_qp(self._pair, byref(attributes), mask), "ibv_modify_qp")

    def _send(self, opcode: int, offset: int, num_bytes: int, **fields: int) -> None:
        segment = Segment(self._start + offset, num_bytes, self._local_key)
        work = SendWork(sg_list=ctypes.pointer(segment), num_sge=1, opcode=opcode, send_flags=_SIGNALED, **fields)
        self._post(self._ops.post_send, work)

    def _post(self, post: Any, work: ctypes.Structure) -> None:
        with self._lock:
            _check_zero(post(self._pair, byref(work), byref(c_void_p())), "posting work")

    def _completion(self, one: WorkCompletion) -> Completion:
        error = self._verbs.ibv_wc_status_str(one.status).decode() if one.status else ""
        immediate = socket.ntohl(one.imm_data) if not error and one.opcode == _WRITTEN else None
        return Completion(
            is_receive=not error and one.opcode in (_RECEIVED, _WRITTEN), number=one.wr_id, num_bytes=one.byte_len,
            immediate=immediate, error=error,
        )  # fmt: skip


def _gid_index(card: Path, is_ethernet: bool) -> int:
    """Return the port's entry for RoCEv2 over IPv4, else over IPv6; of InfiniBand the first one."""
    if not is_ethernet:
        return 0
    port = card / "ports" / str(_PORT)
    found = []
    for file in sorted((port / "gid_attrs" / "types").glob("[0-9]*"), key=lambda one: int(one.name)):
        try:
            kind, gid = file.read_text().strip(), (port / "gids" / file.name).read_text().strip()
        except OSError:  # an entry without an address
            continue
        if kind == "RoCE v2":
            found.append((not gid.startswith("0000:0000:0000:0000:0000:ffff"), int(file.name)))
    if not found:
        raise OSError(0, f"its port {_PORT} has no GID of RoCE v2: give its network interface an IP address")
    return min(found)[1]


def _check(pointer: Any, what: str) -> Any:
    """Return what a function has made; raise `OSError` if it has made nothing."""
    if not pointer:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return pointer


def _check_zero(result: int, what: str) -> None:
    """Raise `OSError` for a function that has failed: it returns a number of errno, or -1 and sets it."""
    if result:
        number = ctypes.get_errno() if result < 0 else result
        raise OSError(number, f"{what}: {os.strerror(number)}")
