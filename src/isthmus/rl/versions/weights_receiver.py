"""`WeightsReceiver`: the weights of a site: the complete version, the one that arrives, and chunks for other sites."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from isthmus.core.errors import InputError
from isthmus.rl.relay.chunk_table import DIGEST_BYTES, PIECE_ELEMENTS, ChunkTable
from isthmus.rl.relay.relay_events import Coding, Version
from isthmus.rl.versions.weights_stream import HALVES, Kind, bits_of, decode_chunk, has_digests, name_of


class WeightsReceiver:
    """Takes the chunks of versions of one model; `tensors` is the last complete one."""

    def __init__(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> None:
        self._shapes, self._dtype = dict(shapes), dtype
        self.table = ChunkTable({name: shape.numel() for name, shape in self._shapes.items()})
        self.tensors: dict[str, torch.Tensor] = {}
        self.version: Version | None = None
        self._digests: dict[Version, bytes] = {}
        self._coding: Coding | None = None
        self._base: dict[str, np.ndarray] = {}
        self._incoming: dict[str, np.ndarray] = {}
        self._codes: dict[Coding, dict[int, tuple[Kind, bytes]]] = {}

    def learn(self, version: Version, digests: bytes) -> None:
        """Take in the digests of a version's pieces; raises `InputError` if they are not what it is named by."""
        layout = {name: (shape, self._dtype) for name, shape in self._shapes.items()}
        if len(digests) != len(self.table.pieces) * DIGEST_BYTES or name_of(layout, digests) != version.digest:
            raise InputError(f"the digests of weights {version.step} give another name", hint="send them again")
        arriving = None if self._coding is None else self._coding.version
        self._digests = {one: kept for one, kept in self._digests.items() if one in (self.version, arriving)}
        self._digests[version] = digests

    def begin(self, coding: Coding) -> None:
        """Begin a version, as changes to the complete one or whole; `learn` has its digests."""
        kind = np.uint16 if self._dtype in HALVES else np.uint32
        self._coding = coding
        self._base = {} if coding.base is None else {name: bits_of(one) for name, one in self.tensors.items()}
        self._incoming = {name: np.empty(shape.numel(), kind) for name, shape in self._shapes.items()}
        if coding.base is not None:
            self._codes[coding] = {}

    def decode(self, coding: Coding, number: int, kind: str, content: bytes) -> np.ndarray | None:
        """Return the elements of a chunk that arrives, [n]; None where they are not those of the version."""
        chunks, digests = self.table.chunks(coding), self._digests.get(coding.version)
        if coding != self._coding or digests is None or not 0 <= number < len(chunks):
            return None
        chunk = chunks[number]
        old = self._base[chunk.name][chunk.start :][: chunk.num_elements] if coding.base is not None else None
        try:
            bits = decode_chunk(kind, content, chunk.num_elements, old, 2 if self._dtype in HALVES else 4)
        except InputError:
            return None
        return bits if has_digests(bits, chunk, PIECE_ELEMENTS, digests) else None

    def keep(self, coding: Coding, number: int, bits: np.ndarray, kind: Kind, content: bytes) -> None:
        """Take in a chunk that `decode` found right, with its code for other sites."""
        chunk = self.table.chunks(coding)[number]
        self._incoming[chunk.name][chunk.start :][: chunk.num_elements] = bits
        if coding.base is not None:
            self._codes[coding][number] = kind, content

    def complete(self, version: Version) -> dict[str, torch.Tensor]:
        """Return the version, of which all chunks were kept."""
        as_int = torch.int16 if self._dtype in HALVES else torch.int32
        signed = np.int16 if self._dtype in HALVES else np.int32
        self.tensors = {
            name: torch.from_numpy(self._incoming[name].view(signed)).view(as_int).view(self._dtype).reshape(shape)
            for name, shape in self._shapes.items()
        }
        self.version, self._coding, self._base, self._incoming = version, None, {}, {}
        return self.tensors

    def forget(self, coding: Coding) -> None:
        """Free the codes of a version for other sites."""
        self._codes.pop(coding, None)

    def give_up(self) -> None:
        """Free what has arrived of a version."""
        if self._coding is not None:
            self.forget(self._coding)
        self._coding, self._base, self._incoming = None, {}, {}

    def chunk(self, coding: Coding, number: int) -> tuple[Kind, np.ndarray | bytes]:
        """Return the kind and content of a chunk that is here, for another site, elements not copied."""
        if coding.base is not None:
            return self._codes[coding][number]
        one = self.table.pieces[number]
        arrives = self._coding is not None and self._coding.version == coding.version
        bits = self._incoming[one.name] if arrives else bits_of(self.tensors[one.name])
        return "full", bits[one.start :][: one.num_elements].view(np.uint8)
