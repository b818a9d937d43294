"""`CourierLink`: the worker's connection to the agent, from the ticket of its part. Standard library only."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus.agent.courier.courier_frames import TOKEN_BYTES, Frame, read_frame, send_frame

ANSWER_S = 20.0
"""Longest wait for an answer of the agent."""


class CourierLink:
    """A connection to the agent; `ask` sends a frame and returns the answer."""

    def __init__(self, ticket: Mapping[str, Any]) -> None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.minimum_version = ssl.TLSVersion.TLSv1_3
        tls.check_hostname = False  # the certificate itself is pinned
        tls.load_verify_locations(cadata=ticket["certificate"])
        raw = socket.create_connection((ticket["address"], ticket["port"]), timeout=ANSWER_S)
        try:
            self._stream = tls.wrap_socket(raw)
        except BaseException:
            raw.close()
            raise
        self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream.sendall(bytes.fromhex(ticket["token"]))

    def ask(self, frame: Frame) -> Frame:
        """Return the agent's answer to a frame."""
        send_frame(self._stream.sendall, frame)
        return read_frame(self._receive)

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()

    def _receive(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        view, at = memoryview(data), 0
        while at < num_bytes:
            count = self._stream.recv_into(view[at:])
            if count == 0:
                raise ConnectionResetError("the agent closed the connection")
            at += count
        return data


def read_ticket(path: Path) -> dict[str, Any]:
    """Return the ticket in a file; raise `ValueError` for any other file."""
    found = json.loads(path.read_bytes())
    if not isinstance(found, dict) or len(bytes.fromhex(found["token"])) != TOKEN_BYTES:
        raise ValueError("no ticket of the courier")
    return {**found, "port": int(found["port"]), "address": str(found["address"])}
