"""Datagrams for `benchmarks.wan_packets`, at a stated rate, between namespaces: what arrives, and how late.

`python -m benchmarks._udp_traffic catch` prints its port and, when nothing has come for a second, a JSON list: goodput
in Mbit/s, then the one-way delay of every read in ms. `... pour HOST:PORT JSON` sends, where JSON holds the
arguments of `pour`, and prints how many datagrams it sent. Both ends share a machine, so a clock too.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time

from isthmus.wan.dial import parse_address
from isthmus.wan.precise_timing import request_prompt_wakeup

_UDP_SEGMENT, _UDP_GRO = 103, 104
"""Socket options of Linux (linux/udp.h), which Python does not name."""
_RECEIVE_BUFFER = 33  # SO_RCVBUFFORCE
_MADE_UP_S = 5e-3
_SENT_AT = struct.Struct("!d")


def pour(address: str, *, datagram_bytes: int, at_once: int, gbps: float, header_bytes: int, span_s: float) -> int:
    """Send `at_once` datagrams a system call for `span_s`, with `header_bytes` each at `gbps`; return their number.

    A sender that waited for a core makes up for `_MADE_UP_S`: more at once would fill the queue of any link.
    """
    request_prompt_wakeup()
    rest = bytes(datagram_bytes * at_once - _SENT_AT.size)
    gap_s = at_once * (datagram_bytes + header_bytes) * 8e-9 / gbps
    segments = [(socket.IPPROTO_UDP, _UDP_SEGMENT, struct.pack("H", datagram_bytes))] if at_once > 1 else []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as near:
        near.connect(parse_address(address))
        end_s, due_s, num_calls = time.monotonic() + span_s, time.monotonic(), 0
        while (now_s := time.monotonic()) < end_s:
            if due_s > now_s:
                time.sleep(due_s - now_s)
            near.sendmsg([_SENT_AT.pack(time.monotonic()), rest], segments)
            due_s = max(due_s, now_s - _MADE_UP_S) + gap_s
            num_calls += 1
    return num_calls * at_once


def catch() -> list[float]:
    """Receive until nothing has come for a second; return goodput and the delay of each read."""
    request_prompt_wakeup()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as far:
        far.setsockopt(socket.SOL_SOCKET, _RECEIVE_BUFFER, 2**25)
        far.setsockopt(socket.IPPROTO_UDP, _UDP_GRO, 1)
        far.bind(("0.0.0.0", 0))
        print(far.getsockname()[1], flush=True)
        buffer, delays_ms = bytearray(2**16), list[float]()
        num_bytes, first_s, last_s = 0, 0.0, 0.0
        while True:
            try:
                size, *_ = far.recvmsg_into([buffer])
            except TimeoutError:
                return [num_bytes * 8e-6 / max(last_s - first_s, 1e-9), *delays_ms]
            last_s = time.monotonic()
            if sent_at_s := _SENT_AT.unpack_from(buffer)[0]:  # the first of a batch may be lost
                delays_ms.append((last_s - sent_at_s) * 1e3)
            if first_s:
                num_bytes += size
            else:
                first_s = last_s
                far.settimeout(1)


def main() -> None:
    """Catch, or pour, and print what was found."""
    found = catch() if sys.argv[1] == "catch" else pour(sys.argv[2], **json.loads(sys.argv[3]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
