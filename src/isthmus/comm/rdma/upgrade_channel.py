"""`upgrade_channel`: goes on by RDMA on a connection that was greeted, authenticated and set up over TCP.

1. Each side opens a queue pair, posts its receives, and sends its record over the connection.
2. Each joins the pair of the other, and says so: nothing is sent to a pair that is not ready.
3. Each sends a message by RDMA and waits for the other's: a network without a way for RDMA is found now.
"""

from __future__ import annotations

from contextlib import suppress

from isthmus.comm.channel.channel import RecordChannel
from isthmus.comm.rdma.rdma_channel import REGION_BYTES, RdmaChannel
from isthmus.comm.rdma.verbs import RECORD_BYTES, VerbsDevice, unpack_record
from isthmus.core.errors import ProtocolError, UnavailableError

PATH_TIMEOUT_S = 5.0
"""Longest wait for the first message by RDMA."""

_READY = b"ready"
_HINT = "state `transport: rdma` for this link at both sites; `ibv_rc_pingpong` tries the network between two cards"


def upgrade_channel(inner: RecordChannel, device: VerbsDevice, rank: int) -> RdmaChannel:
    """Return a channel by RDMA to `rank`, at the other end of `inner`; both sides call this.

    Raises `ProtocolError` for a record that no queue pair has, `UnavailableError` for whatever else fails.
    """
    channel: RdmaChannel | None = None
    try:
        channel = RdmaChannel(inner, device)
        inner.write([channel.record.packed()])
        channel.connect(unpack_record(_read(inner, RECORD_BYTES), REGION_BYTES))
        inner.write([_READY])
        if _read(inner, len(_READY)) != _READY:
            raise ProtocolError("the peer has not joined its queue pair")
        channel.start()
        limit_s = inner.socket.gettimeout()
        inner.socket.settimeout(PATH_TIMEOUT_S if limit_s is None else min(limit_s, PATH_TIMEOUT_S))
        channel.write([_READY])
        channel.read_into(memoryview(bytearray(len(_READY))))
    except (OSError, ProtocolError) as error:
        if channel is not None:
            with suppress(OSError):
                channel.close()
        if isinstance(error, ProtocolError):
            raise ProtocolError(f"rank {rank}: {error.message}", hint=error.hint or _HINT) from error
        raise UnavailableError(f"rank {rank}: no messages by RDMA: {error}", hint=_HINT) from error
    return channel


def _read(inner: RecordChannel, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    inner.read_into(memoryview(data))
    return data
