"""`CentreClient`: asks a decision centre for paths, over one connection that is dialled again where it broke."""

from __future__ import annotations

import json
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from isthmus.core.errors import AuthError, FileError, InputError, ProtocolError, UnavailableError
from isthmus.core.loopback import is_loopback
from isthmus.core.messages.datagram import Address
from isthmus.wan.centre.centre_requests import MAX_LINE_BYTES, AskMessage, LookMessage, NameMessage, PathState
from isthmus.wan.control.wan_topology import PathRequest, TransferRequest
from isthmus.wan.dial import format_address

TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class CentreAddress:
    """Where a centre listens, the secret of its clients, and the CA of its certificate (None on loopback: no TLS)."""

    address: Address
    token: str = field(default="", repr=False)
    ca: Path | None = None

    def __post_init__(self) -> None:
        if not is_loopback(self.address[0]) and self.ca is None:
            raise InputError(
                f"the centre at {self.address[0]} is not on this machine, and no CA of its certificate is named",
                hint="state the file of the CA: the token must not cross the network in the clear",
            )


class CentreClient:
    """Not thread-safe. Every method raises `UnavailableError` if the centre does not answer."""

    def __init__(self, centre: CentreAddress) -> None:
        self._centre = centre
        self._socket: socket.socket | None = None

    def ask(self, request: PathRequest | TransferRequest) -> PathState:
        """Hold a path; the same request again changes nothing."""
        return self._call(AskMessage(request=request))

    def confirm(self, name: str) -> PathState:
        """Book the path that is held."""
        return self._call(NameMessage(kind="confirm", name=name))

    def renew(self, name: str) -> PathState:
        """Hold it on."""
        return self._call(NameMessage(kind="renew", name=name))

    def release(self, name: str) -> PathState:
        """Give it back."""
        return self._call(NameMessage(kind="release", name=name))

    def look(self, name: str) -> PathState:
        """Return its state."""
        return self._call(LookMessage(name=name))

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _call(self, message: AskMessage | NameMessage | LookMessage) -> PathState:
        content = {"token": self._centre.token, "message": message.model_dump(mode="json", by_alias=True)}
        line = json.dumps(content).encode() + b"\n"
        is_old = self._socket is not None
        try:
            answer = self._exchange(line)
        except OSError as error:
            self.close()
            where = format_address(*self._centre.address)
            if not is_old:
                raise UnavailableError(
                    f"the decision centre at {where} does not answer: {error}", hint="isthmus wan centre serves it"
                ) from error
            try:  # every request may be repeated
                answer = self._exchange(line)
            except OSError as again:
                self.close()
                raise UnavailableError(f"the decision centre at {where} does not answer: {again}") from again
        return self._read(answer)

    def _exchange(self, line: bytes) -> bytes:
        if self._socket is None:
            self._socket = self._dial()
        self._socket.sendall(line)
        answer = b""
        while not answer.endswith(b"\n"):
            more = self._socket.recv(MAX_LINE_BYTES)
            if not more or len(answer) + len(more) > MAX_LINE_BYTES:
                raise ConnectionResetError("closed, or an endless answer")
            answer += more
        return answer

    def _dial(self) -> socket.socket:
        sock = socket.create_connection(self._centre.address, timeout=TIMEOUT_S)
        if self._centre.ca is None:
            return sock
        try:
            context = ssl.create_default_context(cafile=str(self._centre.ca))
            return context.wrap_socket(sock, server_hostname=self._centre.address[0])
        except FileNotFoundError as error:
            sock.close()
            raise FileError("cannot be read", file=str(self._centre.ca), hint="the CA of the centre's TLS") from error
        except BaseException:
            sock.close()
            raise

    def _read(self, answer: bytes) -> PathState:
        try:
            found: Any = json.loads(answer)
            if isinstance(found, dict) and "error" in found:
                self.close()
                if "token" in str(found["error"]):
                    raise AuthError(str(found["error"]), hint="both have the same token file")
                raise UnavailableError(
                    f"the decision centre refuses: {found['error']}", hint=str(found.get("hint") or "")
                )
            return PathState.model_validate(found)
        except (ValueError, ValidationError) as error:
            self.close()
            raise ProtocolError("the decision centre sent no answer to the request") from error
