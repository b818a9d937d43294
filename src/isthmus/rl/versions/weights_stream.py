"""`encode_chunk` and `decode_chunk`: a part of a version of weights on a link, and the names of versions.

A chunk is the code of its changes, where the receiver has a base and that is smaller, otherwise its content. A version
is named by the SHA-256 of names, shapes, dtypes and the SHA-256 of each piece: with the name and these digests a
receiver tells a right piece from any other, wherever it comes from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from isthmus.core.errors import InputError
from isthmus.rl.relay.chunk_table import DIGEST_BYTES, Chunk, ChunkTable
from isthmus.rl.relay.relay_events import Version
from isthmus.weights import DeltaError, decode_changes, encode_changes

Kind = Literal["full", "changes"]
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PolicyVersion:
    """The weights after `step` training steps, on the CPU, by full-model name."""

    step: int
    tensors: Mapping[str, torch.Tensor]

    @cached_property
    def table(self) -> ChunkTable:
        """Return the pieces and chunks of the model."""
        return ChunkTable({name: one.numel() for name, one in self.tensors.items()})

    @cached_property
    def digests(self) -> bytes:
        """Return the digests of all pieces."""
        bits = {name: bits_of(one) for name, one in self.tensors.items()}
        return b"".join(digest_of_piece(bits[one.name][one.start :][: one.num_elements]) for one in self.table.pieces)

    @cached_property
    def version(self) -> Version:
        """Return the name of the version."""
        layout = {name: (one.shape, one.dtype) for name, one in self.tensors.items()}
        return Version(self.step, name_of(layout, self.digests))


def name_of(layout: Mapping[str, tuple[torch.Size, torch.dtype]], digests: bytes) -> str:
    """Return the SHA-256 of names, shapes, dtypes and the digests of all pieces."""
    found = hashlib.sha256()
    for name in sorted(layout):
        shape, dtype = layout[name]
        found.update(f"{name} {dtype} {list(shape)}\n".encode())
    found.update(digests)
    return found.hexdigest()


def digest_of_piece(bits: np.ndarray) -> bytes:
    """Return the SHA-256 of the bits of elements, [n]."""
    return hashlib.sha256(bits.tobytes()).digest()


def has_digests(bits: np.ndarray, chunk: Chunk, piece_elements: int, digests: bytes) -> bool:
    """Return whether the pieces of a chunk, [n] in all, have the digests of the version."""
    return all(
        digest_of_piece(bits[place * piece_elements :][:piece_elements])
        == digests[(chunk.first + place) * DIGEST_BYTES :][:DIGEST_BYTES]
        for place in range(chunk.num_pieces)
    )


def encode_chunk(new: np.ndarray, old: np.ndarray | None) -> tuple[Kind, bytes]:
    """Return the kind and the content of elements, [n], as changes to `old` [n] where it is given."""
    if old is not None:
        code = encode_changes(old, new)
        if len(code) < new.nbytes:
            return "changes", code
    return "full", new.tobytes()


def decode_chunk(kind: str, content: bytes, count: int, old: np.ndarray | None, itemsize: int) -> np.ndarray:
    """Return the elements of a chunk, [count]; raises `InputError` for what is none."""
    element = np.uint16 if itemsize == 2 else np.uint32
    try:
        if kind == "full" and len(content) == count * itemsize:
            return np.frombuffer(content, element, count)
        if kind == "changes" and old is not None:
            return decode_changes(old, content)[0]
    except (DeltaError, ValueError) as error:
        raise InputError(f"a chunk is damaged: {error}", hint="it is asked for again") from error
    raise InputError(f"{len(content)} bytes are no chunk '{kind:.20}' of {count} elements", hint="send it again")


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the bits of a tensor as unsigned integers, [n], without a copy."""
    flat = tensor.detach().contiguous().reshape(-1)
    kind, as_int = (np.uint16, torch.int16) if tensor.dtype in HALVES else (np.uint32, torch.int32)
    bits: np.ndarray = flat.view(as_int).numpy().view(kind)
    return bits
