"""How a leg is opened: Noise_NNpsk0 with the key that two sites share, around the identity of a tunnel and its leg.

| step | from | what it proves |
|---|---|---|
| 1 | dialler: id of the key, ephemeral key, tunnel, index, whether the tunnel is new (encrypted) | it had the key |
| 2 | listener: its ephemeral key | it has the key |
| 3 | dialler: a ping, the first record under the keys of this leg | it has the key now: a recording ends here |
| 4 | listener: a ping, or the end of a tunnel that it does not know | |

A stranger gets no byte. Nor does a proxy of a release with another form of frames: the id of the key says which, so
that the listener names the site in its log, and nothing is sent that the other side would misread.
"""

from __future__ import annotations

import hmac
import json
import logging
import struct
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field

from isthmus.core.errors import ProtocolError
from isthmus.noise import KEY_BYTES, TAG_BYTES, CipherState, NoiseHandshake, UnauthenticatedError
from isthmus.wan.tunnel.tunnel_frame import HEADER_BYTES, FrameKind, TunnelFrame, parse_frame_header

VERSION = 2
"""Form of frames and packets: raised when a proxy of the release before would refuse what this one sends."""

TUNNEL_ID_BYTES = 16
_KEY_ID_BYTES = 16
_IDENTITY = struct.Struct(f"!{TUNNEL_ID_BYTES}sBB")
FIRST_BYTES = _KEY_ID_BYTES + KEY_BYTES + _IDENTITY.size + TAG_BYTES
SECOND_BYTES = KEY_BYTES + TAG_BYTES
RECORD_BYTES = HEADER_BYTES + TAG_BYTES
_PING, _END = TunnelFrame(FrameKind.PING), TunnelFrame(FrameKind.END)
_log = logging.getLogger(__name__)


class LegDialler:
    """The dialler's side: `first`, then `proof` of the answer, then `confirm`."""

    def __init__(self, key: bytes, sites: tuple[str, str], tunnel: bytes, index: int, *, is_new: bool) -> None:
        """`sites` are those of dialler and listener."""
        self._noise = NoiseHandshake(_derive(key, "handshake"), _prologue(*sites))
        self.first = _key_id(key, VERSION) + self._noise.write_first(_IDENTITY.pack(tunnel, index, is_new))
        self.sending: CipherState | None = None
        self.receiving: CipherState | None = None

    def read_second(self, second: bytes) -> tuple[bytes, bytes]:
        """Return the keys to and from the listener after its message; raise `UnauthenticatedError`.

        A forged message changes nothing: the listener's own may still come.
        """
        noise = copy(self._noise)
        noise.read_second(second)
        return noise.split_keys()

    def proof(self, second: bytes) -> bytes:
        """Return the record that proves the key, after the listener's message; raise `UnauthenticatedError`."""
        sending, receiving = self.read_second(second)
        self.sending, self.receiving = CipherState(sending), CipherState(receiving)
        return self.sending.encrypt(_PING.header())

    def confirm(self, record: bytes) -> bool:
        """Return whether the listener takes the leg, False if it does not know the tunnel."""
        if self.receiving is None:
            raise ProtocolError("a leg is confirmed after its proof")
        frame, num_bytes = parse_frame_header(self.receiving.decrypt(record))
        if num_bytes or frame.kind not in (FrameKind.PING, FrameKind.END):
            raise ProtocolError(f"a leg was answered by a frame {frame.kind.name}")
        return frame.kind is FrameKind.PING


@dataclass(frozen=True)
class OpenedLeg:
    """The listener's side, after a first message under a key that it shares with `site`."""

    site: str
    tunnel: bytes
    index: int
    is_new: bool
    second: bytes
    """What to answer."""
    sending: CipherState
    receiving: CipherState
    keys: tuple[bytes, bytes] = field(repr=False)
    """The keys of both, for the cipher of a leg over datagrams in their place."""

    def prove(self, record: bytes) -> None:
        """Check the dialler's proof; raise `UnauthenticatedError` or `ProtocolError`."""
        frame, num_bytes = parse_frame_header(self.receiving.decrypt(record))
        if num_bytes or frame.kind is not FrameKind.PING:
            raise ProtocolError(f"a leg begins with a frame {frame.kind.name}")

    def verdict(self, *, is_known: bool) -> bytes:
        """Return the last record: the leg is taken, or its tunnel is unknown here."""
        return self.sending.encrypt((_PING if is_known else _END).header())


class LegListener:
    """The keys of a proxy: one for each site that may open legs to it."""

    def __init__(self, site: str, keys: Mapping[str, bytes]) -> None:
        self._site = site
        self._keys = {_key_id(key, VERSION): (peer, _derive(key, "handshake")) for peer, key in keys.items()}
        self._older = {_key_id(key, old): (peer, old) for peer, key in keys.items() for old in range(1, VERSION)}

    def open(self, first: bytes) -> OpenedLeg | None:
        """Return what a first message opens; None for a stranger's."""
        peer, psk = self._keys.get(first[:_KEY_ID_BYTES], (None, b""))
        if peer is None or len(first) != FIRST_BYTES:
            if (older := self._older.pop(first[:_KEY_ID_BYTES], None)) is not None:  # told once
                _log.warning(
                    "the proxy of %s opens legs by version %d, this one by %d: install one release at both sites",
                    *older, VERSION,
                )  # fmt: skip
            return None
        noise = NoiseHandshake(psk, _prologue(peer, self._site))
        try:
            tunnel, index, is_new = _IDENTITY.unpack(noise.read_first(first[_KEY_ID_BYTES:]))
            second = noise.write_second(b"")
        except UnauthenticatedError:
            return None
        receiving, sending = noise.split_keys()
        states = CipherState(sending), CipherState(receiving)
        return OpenedLeg(peer, tunnel, index, bool(is_new), second, *states, (sending, receiving))


def _prologue(dialler: str, listener: str) -> bytes:
    return json.dumps([f"isthmus proxy {VERSION}", dialler, listener]).encode()


def _key_id(key: bytes, version: int) -> bytes:
    return _derive(key, "key id" if version == 1 else f"key id {version}")[:_KEY_ID_BYTES]


def _derive(key: bytes, use: str) -> bytes:
    return hmac.digest(key, f"isthmus proxy: {use}".encode(), "sha256")
