"""The bound of a proxy for `benchmarks.wan_proxy`: `python -m benchmarks._wan_relay near|far LISTEN TARGET`.

One connection through one pair of processes that do what no proxy can leave out: read, seal or open records of 256 KiB
with AES-256-GCM, write. One BBR stream, blocking calls, no event loop, no frames, no credit, no resends.
"""

from __future__ import annotations

import socket
import sys
import threading

from isthmus.noise import KEY_BYTES, TAG_BYTES, CipherState
from isthmus.wan.dial import parse_address
from isthmus.wan.legs.tcp_leg import set_leg_options

_RECORD_BYTES = 2**18
_LENGTH_BYTES = 4


def seal(source: socket.socket, target: socket.socket) -> None:
    """Send what `source` sends to `target` in sealed records, until its end."""
    cipher, plain = CipherState(bytes(KEY_BYTES)), bytearray(_RECORD_BYTES)
    sealed = memoryview(bytearray(_LENGTH_BYTES + _RECORD_BYTES + TAG_BYTES))
    while num_bytes := source.recv_into(plain):
        end = _LENGTH_BYTES + num_bytes + TAG_BYTES
        sealed[:_LENGTH_BYTES] = (num_bytes + TAG_BYTES).to_bytes(_LENGTH_BYTES, "big")
        cipher.encrypt_into(memoryview(plain)[:num_bytes], sealed[_LENGTH_BYTES:end])
        target.sendall(sealed[:end])
    target.shutdown(socket.SHUT_WR)


def unseal(source: socket.socket, target: socket.socket) -> None:
    """Send the content of the records of `source` to `target`, until their end."""
    cipher, plain = CipherState(bytes(KEY_BYTES)), memoryview(bytearray(_RECORD_BYTES))
    sealed, length = memoryview(bytearray(_RECORD_BYTES + TAG_BYTES)), bytearray(_LENGTH_BYTES)
    while source.recv_into(length, _LENGTH_BYTES, socket.MSG_WAITALL) == _LENGTH_BYTES:
        num_bytes = int.from_bytes(length, "big")
        if source.recv_into(sealed, num_bytes, socket.MSG_WAITALL) < num_bytes:
            return
        cipher.decrypt_into(sealed[:num_bytes], plain[: num_bytes - TAG_BYTES])
        target.sendall(plain[: num_bytes - TAG_BYTES])
    target.shutdown(socket.SHUT_WR)


def carry(side: str, near: socket.socket, there: tuple[str, int]) -> None:
    """Carry one connection both ways."""
    far = socket.create_connection(there)
    leg, plain = (far, near) if side == "near" else (near, far)
    set_leg_options(leg)
    leg.setblocking(True)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    threading.Thread(target=unseal, args=(leg, plain), daemon=True).start()
    seal(plain, leg)


def main() -> None:
    """Print a line, and serve until killed."""
    side, listen, there = sys.argv[1:]
    with socket.create_server(parse_address(listen)) as listener:
        print("up", flush=True)
        while True:
            near, _ = listener.accept()
            threading.Thread(target=carry, args=(side, near, parse_address(there)), daemon=True).start()


if __name__ == "__main__":
    main()
