"""Frames of the courier: a JSON head and bytes, with lengths in front; both ends read them with the same bounds.

Needs nothing but the standard library: the worker's end runs where Isthmus may not be installed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_HEAD_BYTES = 256 << 10
MAX_BODY_BYTES = 1 << 20
MAX_FILES = 1000
"""Files of a run folder that are carried in either direction."""

TOKEN_BYTES = 32
"""What a caller sends first: the token of its ticket. Nothing of it is parsed before the token is known."""

VERSION = 1

_LENGTHS = struct.Struct("!II")
_JOINED_BYTES = 32 << 10
_MAX_NAME_BYTES = 200
_MAX_TEXT_CHARS = 4096
_MAX_NUMBER = 2**53

ReceiveExactly = Callable[[int], bytes | bytearray]


class FrameError(Exception):
    """Raised for a frame, name or number that the protocol does not allow; the connection ends."""


@dataclass(frozen=True)
class Frame:
    """A frame: its kind, its fields and its bytes. The getters raise `FrameError` for what is not there."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    body: bytes | bytearray = b""

    def text(self, name: str) -> str:
        """Return a field of text."""
        value = self.fields.get(name)
        if not isinstance(value, str) or len(value) > _MAX_TEXT_CHARS:
            raise FrameError(f"{self.kind}: '{name}' is no text")
        return value

    def number(self, name: str) -> int:
        """Return a field that is a whole number, at least 0."""
        value = self.fields.get(name)
        if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
            raise FrameError(f"{self.kind}: '{name}' is no number")
        return value

    def seconds(self, name: str) -> float:
        """Return a field of seconds, at least 0."""
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_NUMBER:
            raise FrameError(f"{self.kind}: '{name}' is no time")
        return float(value)

    def mapping(self, name: str) -> dict[str, Any]:
        """Return a field that is an object."""
        value = self.fields.get(name)
        if not isinstance(value, dict) or len(value) > MAX_FILES:
            raise FrameError(f"{self.kind}: '{name}' is no object")
        return value

    def file_name(self) -> str:
        """Return the field `name`: that of a file directly in the run folder."""
        name = self.text("name")
        if not is_carried_name(name):
            raise FrameError(f"{self.kind}: {name!r} is not the name of a file of a run folder")
        return name


def is_carried_name(name: str) -> bool:
    """Return whether a file of this name is carried: one level, not hidden, no control characters."""
    plain = name.isprintable() and "/" not in name and not name.startswith(".")
    return bool(name) and plain and len(name.encode(errors="replace")) <= _MAX_NAME_BYTES


def pack_frame(frame: Frame) -> bytes:
    """Return the bytes of a frame."""
    return pack_head(frame) + frame.body


def pack_head(frame: Frame) -> bytes:
    """Return the bytes of a frame before its body."""
    head = json.dumps({**frame.fields, "kind": frame.kind}, separators=(",", ":")).encode()
    if len(head) > MAX_HEAD_BYTES or len(frame.body) > MAX_BODY_BYTES:
        raise FrameError(f"{frame.kind}: too long")
    return _LENGTHS.pack(len(head), len(frame.body)) + head


def send_frame(send: Callable[[bytes | bytearray], object], frame: Frame) -> None:
    """Send a frame; a long body is not copied."""
    if len(frame.body) < _JOINED_BYTES:
        send(pack_frame(frame))
        return
    send(pack_head(frame))
    send(frame.body)


def read_frame(receive: ReceiveExactly) -> Frame:
    """Return the next frame; announced lengths are checked before anything of their size is read."""
    head_bytes, body_bytes = _LENGTHS.unpack(receive(_LENGTHS.size))
    if not 0 < head_bytes <= MAX_HEAD_BYTES or body_bytes > MAX_BODY_BYTES:
        raise FrameError(f"a frame announces {head_bytes} and {body_bytes} bytes")
    try:
        fields = json.loads(receive(head_bytes))
    except (ValueError, RecursionError):
        raise FrameError("the head of a frame is no JSON") from None
    kind = fields.pop("kind", None) if isinstance(fields, dict) else None
    if not isinstance(kind, str):
        raise FrameError("the head of a frame has no kind")
    return Frame(kind, fields, receive(body_bytes) if body_bytes else b"")
