"""`parse_cm`: what a connection management message says of the queue pair that it sets up or ends.

Sources: InfiniBand Architecture Specification, volume 1: 9.3.3 (datagram header), 13.4.3 (MAD header), 12.6 and 12.7
(messages and their fields). Messages go to queue pair 1 as unreliable datagrams of one packet with a MAD of 256 bytes.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from isthmus.wan.roce.roce_opcodes import Opcode
from isthmus.wan.roce.roce_view import BTH_BYTES, RoceView

CM_QUEUE_PAIR = 1
MAD_BYTES = 256
_DETH_BYTES = 8
_MAD = struct.Struct("!BBBBHHQHHI")
_CM_CLASS = (1, 0x07, 2, 0x03)
"""Base version, class, its version, and the method `Send`."""

_IDS = struct.Struct("!II")
_REQ = struct.Struct("!32xI8xI2xB")
_REP = struct.Struct("!12xI4xI")
_MTUS_BYTES = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}


class CmKind(enum.IntEnum):
    """Messages by their attribute."""

    REQ = 0x10
    REJ = 0x12
    REP = 0x13
    RTU = 0x14
    DREQ = 0x15
    DREP = 0x16


_KINDS = frozenset(int(kind) for kind in CmKind)


class CmMessage(NamedTuple):
    """A message; a number that its kind lacks is -1."""

    kind: CmKind
    local_id: int
    """The sender's number of the connection."""
    remote_id: int = -1
    """The receiver's number; a REQ has none."""
    queue_pair: int = -1
    """The sender's queue pair, in REQ and REP."""
    first_psn: int = -1
    """Number of the first packet that the sender will send, in REQ and REP."""
    mtu_bytes: int = -1
    """Path MTU, in a REQ."""


def parse_cm(view: RoceView) -> CmMessage | None:
    """Return the message in a frame; None for a frame that has none, or says what cannot be."""
    place = view.base + BTH_BYTES + _DETH_BYTES
    if view.opcode != Opcode.DATAGRAM_SEND_ONLY or view.queue_pair != CM_QUEUE_PAIR:
        return None
    if len(view.frame) != place + MAD_BYTES + 4:
        return None
    version, kind_of_class, class_version, method, *_, attribute, _, _ = _MAD.unpack_from(view.frame, place)
    if (version, kind_of_class, class_version, method) != _CM_CLASS or attribute not in _KINDS:
        return None
    kind, place = CmKind(attribute), place + _MAD.size
    local_id, remote_id = _IDS.unpack_from(view.frame, place)
    if kind is CmKind.REQ:
        pair, number, mtu = _REQ.unpack_from(view.frame, place)
        mtu_bytes = _MTUS_BYTES.get(mtu >> 4)
        if mtu_bytes is None:
            return None
        return CmMessage(kind, local_id, queue_pair=pair >> 8, first_psn=number >> 8, mtu_bytes=mtu_bytes)
    if kind is CmKind.REP:
        pair, number = _REP.unpack_from(view.frame, place)
        return CmMessage(kind, local_id, remote_id, pair >> 8, number >> 8)
    return CmMessage(kind, local_id, remote_id)
