"""`upgrade_channel`: goes on by RDMA on a connection that was greeted, authenticated and set up over TCP.

1. Each side opens a queue pair, posts its receives, and sends its record over the connection.
2. Each joins the pair of the other, and says so: nothing is sent to a pair that is not ready.
3. Each sends a message by RDMA, and waits for the other's and until its own is acknowledged: a network that lacks a way
   for RDMA, in either direction, is found now, and at both sides.
"""

from __future__ import annotations

from contextlib import suppress

from isthmus.comm.channel.channel import RecordChannel
from isthmus.comm.rdma.rdma_channel import REGION_BYTES, RdmaChannel
from isthmus.comm.rdma.verbs import RECORD_BYTES, VerbsDevice, unpack_record
from isthmus.core.errors import ProtocolError, UnavailableError

PATH_TIMEOUT_S = 5.0
"""Longest wait for each answer of the peer, and for the first message by RDMA."""

_READY = b"ready"
_HINT = "state `transport: rdma` for this link at both sites; `ibv_rc_pingpong` tries the network between two cards"


class UpgradeError(UnavailableError):
    """A connection that does not go on by RDMA."""


def upgrade_channel(inner: RecordChannel, device: VerbsDevice, rank: int) -> RdmaChannel:
    """Return a channel by RDMA to `rank`, at the other end of `inner`; both sides call this.

    Raises `UpgradeError`, which names the rank, for whatever fails: also where the peer goes on over TCP.
    """
    channel: RdmaChannel | None = None
    limit_s = inner.socket.gettimeout()
    inner.socket.settimeout(PATH_TIMEOUT_S if limit_s is None else min(limit_s, PATH_TIMEOUT_S))
    try:
        channel = RdmaChannel(inner, device)
        inner.write([channel.record.packed()])
        channel.connect(unpack_record(_read(inner, RECORD_BYTES), REGION_BYTES))
        inner.write([_READY])
        if _read(inner, len(_READY)) != _READY:
            raise ProtocolError("the peer has not joined its queue pair")
        channel.start()
        channel.write([_READY])
        channel.read_into(memoryview(bytearray(len(_READY))))
        channel.wait_until_sent(PATH_TIMEOUT_S)
    except Exception as error:  # a defect of a driver too: nothing else releases the pair
        if channel is not None:
            with suppress(OSError):
                channel.close()
        why = getattr(error, "message", str(error))
        raise UpgradeError(f"rank {rank}: no messages by RDMA: {why}", hint=_HINT) from error
    return channel


def _read(inner: RecordChannel, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    inner.read_into(memoryview(data))
    return data
