"""What the interpreter and the kernel take for a frame of any gateway: the bound of its packets in a CPU second."""

from __future__ import annotations

import socket
import statistics
import struct
import time
from collections.abc import Sequence

from isthmus.wan.roce.roce_view import view_frame

_ADDRESSES, _PORTS, _TRANSPORT = struct.Struct("!8s"), struct.Struct("!HH"), struct.Struct("!BBHII")


def flow_key(frame: bytes) -> tuple[bytes, int, int]:
    """Return addresses, source port and queue pair of an IPv4 frame."""
    (ends,) = _ADDRESSES.unpack_from(frame, 12)
    source_port, _ = _PORTS.unpack_from(frame, 20)
    _, _, _, queue_pair, _ = _TRANSPORT.unpack_from(frame, 28)
    return ends, source_port, queue_pair & 0xFFFFFF


def forwarded_in_a_cpu_s(frames: Sequence[bytes], num_runs: int, run: int) -> float:
    """Return the frames in a CPU second of `recv`, three `struct`s, a look-up in a dict and `sendto`; nothing else.

    `run` frames are in the socket's buffer before each run; who puts them there is not counted.
    """
    table = {flow_key(frame): place for place, frame in enumerate(frames)}
    near, far, sink = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(3))
    spent = []
    try:
        for one in (near, far, sink):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**22)
            one.bind(("127.0.0.1", 0))
        receive, send, target, look_up = near.recv, far.sendto, sink.getsockname(), table.__getitem__
        for turn in range(num_runs):
            for place in range(run):
                sink.sendto(frames[(turn * run + place) % len(frames)], near.getsockname())
            start_s = time.process_time()
            for _ in range(run):
                frame = receive(65_536)
                look_up(flow_key(frame))
                send(frame, target)
            spent.append(time.process_time() - start_s)
            for _ in range(run):
                sink.recv(65_536)
    finally:
        for one in (near, far, sink):
            one.close()
    return run / statistics.median(spent)


def viewed_in_a_cpu_s(frames: Sequence[bytes]) -> float:
    """Return the frames in a CPU second that are read and checked: headers, and both CRCs."""
    start_s = time.process_time()
    for frame in frames:
        view_frame(frame)
    return len(frames) / (time.process_time() - start_s)
