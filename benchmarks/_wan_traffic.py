"""Traffic for `benchmarks.wan_links`: a server and a client that run anywhere, also inside a namespace.

`python -m benchmarks._wan_traffic serve HOST` prints its port; `... send HOST:PORT JSON` prints a JSON list,
where JSON holds the arguments of `send` (goodput of each flow, Mbit/s), of `ping` (round trips, ms) or of `messages`
(messages and their short answers, ms).
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import sys
import threading
import time

from isthmus.wan.dial import dial, parse_address
from isthmus.wan.precise_timing import request_prompt_wakeup

_WINDOW = struct.Struct("!dd")


def serve(host: str) -> None:
    """Echo (`e`), answer messages (`m`), or report the goodput of a stated window (`s`); until killed."""
    with socket.create_server((host, 0), backlog=64) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        try:
            kind = connection.recv(1)
            if kind == b"e":
                request_prompt_wakeup()
                while data := connection.recv(1 << 16):
                    connection.sendall(data)
            elif kind == b"m":
                _answer_messages(connection)
            else:
                _swallow(connection)
        except OSError:
            return


def _answer_messages(connection: socket.socket) -> None:
    """Answer each message of the size that the client states with one byte."""
    buffer = bytearray(int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big"))
    while connection.recv_into(buffer, len(buffer), socket.MSG_WAITALL) == len(buffer):
        connection.sendall(b"!")


def _swallow(connection: socket.socket) -> None:
    skip_s, window_s = _WINDOW.unpack(connection.recv(_WINDOW.size, socket.MSG_WAITALL))
    buffer, num_bytes = bytearray(1 << 20), 0
    start_s = time.monotonic() + skip_s
    now_s, first_s = time.monotonic(), None
    while now_s < start_s + window_s:
        got = connection.recv_into(buffer)
        now_s = time.monotonic()
        if first_s is not None:
            num_bytes += got
        elif now_s >= start_s:
            first_s = now_s
    connection.sendall(struct.pack("!d", num_bytes * 8e-6 / max(now_s - (first_s or now_s), 1e-9)))
    while connection.recv_into(buffer):
        pass


def send(
    address: str, proxy: str | None = None, flows: int = 1, skip_s: float = 0.5, window_s: float = 2.0
) -> list[float]:
    """Send as fast as `flows` connections take it; return each one's goodput at the receiver in Mbit/s."""
    block, found = bytes(1 << 18), dict[socket.socket, float]()
    connections = [dial(parse_address(address), proxy) for _ in range(flows)]
    with selectors.DefaultSelector() as ready:
        for connection in connections:
            connection.sendall(b"s" + _WINDOW.pack(skip_s, window_s))
            connection.setblocking(False)
            ready.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
        while len(found) < flows:
            for key, events in ready.select():
                connection = key.data
                if events & selectors.EVENT_READ:
                    found[connection] = struct.unpack("!d", connection.recv(8))[0]
                    ready.unregister(connection)
                else:
                    connection.send(block)
    for connection in connections:
        connection.close()
    return [found[connection] for connection in connections]


def ping(
    address: str,
    proxy: str | None = None,
    count: int = 20,
    num_bytes: int = 64,
    gap_s: float = 0.0,
    soon: bool = False,
) -> list[float]:
    """Return dial time and then `count` echoes of a message of `num_bytes`, in milliseconds.

    `soon` asks the scheduler to wake this process promptly: then the link is measured, not its end.
    """
    if soon:
        request_prompt_wakeup()
    times_ms, message = [], bytes(num_bytes)
    start_s = time.monotonic()
    with dial(parse_address(address), proxy) as connection:
        times_ms.append((time.monotonic() - start_s) * 1e3)
        connection.sendall(b"e")
        for _ in range(count):
            start_s = time.monotonic()
            connection.sendall(message)
            connection.recv(num_bytes, socket.MSG_WAITALL)
            times_ms.append((time.monotonic() - start_s) * 1e3)
            time.sleep(gap_s)
    return times_ms


def messages(
    address: str,
    proxy: str | None = None,
    num_bytes: int = 10**6,
    first: int = 10,
    most: int = 300,
    most_s: float = 10.0,
) -> list[float]:
    """Return how long a message and its answer take, in ms: `most` of them after the `first`, or those of `most_s`."""
    times_ms, message = [], bytes(num_bytes)
    with dial(parse_address(address), proxy) as connection:
        connection.sendall(b"m" + num_bytes.to_bytes(4, "big"))
        begun_s = time.monotonic()
        while len(times_ms) < first + most and (time.monotonic() < begun_s + most_s or len(times_ms) <= first):
            start_s = time.monotonic()
            connection.sendall(message)
            connection.recv(1, socket.MSG_WAITALL)
            times_ms.append((time.monotonic() - start_s) * 1e3)
    return times_ms[first:]


def main() -> None:
    """Serve, or run one measurement and print it."""
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        options = json.loads(sys.argv[3])
        found = {"send": send, "ping": ping, "messages": messages}[sys.argv[1]](sys.argv[2], **options)
        print(json.dumps(found))


if __name__ == "__main__":
    main()
