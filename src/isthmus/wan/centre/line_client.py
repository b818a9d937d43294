"""`LineClient`: sends requests to a port of lines of JSON, over one connection that is dialled again where it broke."""

from __future__ import annotations

import json
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isthmus.core.errors import AuthError, FileError, InputError, ProtocolError, UnavailableError
from isthmus.core.loopback import is_loopback
from isthmus.core.messages.datagram import Address
from isthmus.wan.dial import format_address

TIMEOUT_S = 10.0
_READ_BYTES = 2**16


@dataclass(frozen=True, kw_only=True)
class CentreAddress:
    """Where a port listens, the secret of its clients, and the CA of its certificate (None on loopback: no TLS)."""

    address: Address
    token: str = field(default="", repr=False)
    ca: Path | None = None

    def __post_init__(self) -> None:
        if not is_loopback(self.address[0]) and self.ca is None:
            raise InputError(
                f"the port at {self.address[0]} is not on this machine, and no CA of its certificate is named",
                hint="state the file of the CA: the token must not cross the network in the clear",
            )


class LineClient:
    """A client of the port that `what` names, not thread-safe. `serves` names the command that serves it."""

    def __init__(
        self,
        address: CentreAddress,
        what: str,
        serves: str,
        *,
        timeout_s: float = TIMEOUT_S,
        max_answer_bytes: int = 2**16,
    ) -> None:
        self._address, self._serves, self._timeout_s = address, serves, timeout_s
        self._what = f"the {what} at {format_address(*address.address)}"
        self._max_answer_bytes = max_answer_bytes
        self._socket: socket.socket | None = None

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def call(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to `message`, which may arrive twice. Raise `UnavailableError` if there is none."""
        line = json.dumps({"token": self._address.token, "message": message}).encode() + b"\n"
        is_old = self._socket is not None
        try:
            answer = self._exchange(line)
        except OSError as error:
            self.close()
            if not is_old:
                raise UnavailableError(f"{self._what} does not answer: {error}", hint=self._serves) from error
            try:
                answer = self._exchange(line)
            except OSError as again:
                self.close()
                raise UnavailableError(f"{self._what} does not answer: {again}") from again
        return self._read(answer)

    def refuse(self, error: Exception) -> ProtocolError:
        """Return the error for an answer that is none; the connection ends."""
        self.close()
        return ProtocolError(f"{self._what} sent no answer to the request: {type(error).__name__}")

    def _exchange(self, line: bytes) -> bytes:
        if self._socket is None:
            self._socket = self._dial()
        self._socket.sendall(line)
        answer = bytearray()
        while not answer.endswith(b"\n"):
            more = self._socket.recv(_READ_BYTES)
            if not more or len(answer) + len(more) > self._max_answer_bytes:
                raise ConnectionResetError("closed, or an endless answer")
            answer += more
        return bytes(answer)

    def _dial(self) -> socket.socket:
        sock = socket.create_connection(self._address.address, timeout=self._timeout_s)
        if self._address.ca is None:
            return sock
        try:
            context = ssl.create_default_context(cafile=str(self._address.ca))
            return context.wrap_socket(sock, server_hostname=self._address.address[0])
        except FileNotFoundError as error:
            sock.close()
            raise FileError("cannot be read", file=str(self._address.ca), hint="the CA of the port's TLS") from error
        except BaseException:
            sock.close()
            raise

    def _read(self, answer: bytes) -> dict[str, Any]:
        try:
            found: Any = json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise self.refuse(error) from error
        if not isinstance(found, dict):
            raise self.refuse(TypeError())
        if "error" in found:
            self.close()
            if "token" in str(found["error"]):
                raise AuthError(str(found["error"]), hint="both have the same token file")
            raise UnavailableError(f"{self._what} refuses: {found['error']}", hint=str(found.get("hint") or ""))
        return found
