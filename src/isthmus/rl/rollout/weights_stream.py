"""`encode_version` and `WeightsReceiver`: a new version of weights in chunks, as changes to one that both sides have.

A chunk is up to `CHUNK_ELEMENTS` elements of one tensor: nothing where none changed, the code of `isthmus.weights` for
16-bit floats, whole where that is smaller or the receiver has no base. Chunks are coded as they are sent, and applied
as they arrive. A version is named by the SHA-256 of all its tensors, which the receiver computes before it uses them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from isthmus.core.errors import InputError
from isthmus.weights import DeltaError, decode_changes, encode_changes

CHUNK_ELEMENTS = 1 << 20
"""Most elements of a chunk: at 20 ms and 0.2 Gbit/s, a chunk of 1 % changes is on its way while the next is coded."""

_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PolicyVersion:
    """The weights after `step` training steps, on the CPU, by full-model name."""

    step: int
    tensors: Mapping[str, torch.Tensor]

    def digest(self) -> str:
        """Return the SHA-256 of names, shapes, dtypes and values."""
        return digest_of(self.tensors)


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of names, shapes, dtypes and values, in the order of the names."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        one = tensors[name]
        found.update(f"{name} {one.dtype} {list(one.shape)}\n".encode())
        found.update(_bits(one).tobytes())
    return found.hexdigest()


def encode_version(new: PolicyVersion, base: PolicyVersion | None) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield the chunks of a version, header and content, as changes to `base` where it is given."""
    for name, tensor in new.tensors.items():
        old = None if base is None else _bits(base.tensors[name])
        bits = _bits(tensor)
        for start in range(0, max(bits.size, 1), CHUNK_ELEMENTS):
            piece = bits[start : start + CHUNK_ELEMENTS]
            kind, content = _encode(piece, None if old is None else old[start : start + CHUNK_ELEMENTS])
            yield {"name": name, "start": start, "count": piece.size, "kind": kind}, content


def _encode(new: np.ndarray, old: np.ndarray | None) -> tuple[str, bytes]:
    if old is not None:
        if new.itemsize == 2:
            code = encode_changes(old, new)
            if len(code) < new.nbytes:
                return "changes", code
        elif np.array_equal(old, new):
            return "changes", b""
    return "full", new.tobytes()


class WeightsReceiver:
    """Takes the chunks of versions; `tensors` is the last complete one, of the shapes of `shapes`."""

    def __init__(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> None:
        self._shapes, self._dtype = dict(shapes), dtype
        self.tensors: dict[str, torch.Tensor] = {}
        self.step = -1
        self._incoming: dict[str, np.ndarray] = {}
        self._num_elements = 0

    def begin(self, base: int | None) -> None:
        """Begin a version as changes to the last one, or whole (None); raises `InputError` for another base."""
        if base is not None and base != self.step:
            raise InputError(f"weights {base} are the base, this engine has {self.step}", hint="send them whole")
        self._num_elements = 0
        if base is None:
            kind = np.uint16 if self._dtype in _HALVES else np.uint32
            self._incoming = {name: np.zeros(shape.numel(), kind) for name, shape in self._shapes.items()}
        else:
            self._incoming = {name: _bits(one).copy() for name, one in self.tensors.items()}

    def add(self, header: Mapping[str, Any], content: bytes) -> None:
        """Take in a chunk; raises `InputError` for one that is damaged or of another model."""
        name, start, count = header.get("name"), header.get("start"), header.get("count")
        into = self._incoming.get(str(name))
        if into is None or not isinstance(start, int) or not isinstance(count, int) or start < 0 or count < 0:
            raise InputError(f"a chunk of '{name}', which the model has not", hint="use the same model at all sites")
        if start + count > into.size or count > CHUNK_ELEMENTS:
            raise InputError(f"elements {start} to {start + count} of {into.size} of {name}", hint="send them again")
        piece = into[start : start + count]
        try:
            if header.get("kind") == "full":
                piece[:] = np.frombuffer(content, piece.dtype, count)
            elif piece.itemsize == 2:
                piece[:], _ = decode_changes(piece, content)
            elif content:
                raise InputError("changes of 32-bit elements", hint="send them whole")
        except (DeltaError, ValueError) as error:
            raise InputError(f"a chunk of {name} is damaged: {error}", hint="send the version again") from error
        self._num_elements += count

    def finish(self, step: int, digest: str) -> dict[str, torch.Tensor]:
        """Return the version, complete; raises `InputError` if it is not the one that `digest` names."""
        dtype = self._dtype
        found = {
            name: torch.from_numpy(self._incoming[name].view(np.int16 if dtype in _HALVES else np.int32))
            .view(dtype)
            .reshape(shape)
            for name, shape in self._shapes.items()
            if name in self._incoming
        }
        total = sum(shape.numel() for shape in self._shapes.values())
        if self._num_elements != total or len(found) != len(self._shapes):
            raise InputError(f"{self._num_elements} of {total} elements arrived", hint="send the version again")
        if digest_of(found) != digest:
            raise InputError(f"weights {step} have another digest than was announced", hint="send them whole")
        self.tensors, self.step, self._incoming = found, step, {}
        return found


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """Return the bits of a tensor as unsigned integers, [n], without a copy."""
    flat = tensor.detach().contiguous().reshape(-1)
    kind, as_int = (np.uint16, torch.int16) if tensor.dtype in _HALVES else (np.uint32, torch.int32)
    bits: np.ndarray = flat.view(as_int).numpy().view(kind)
    return bits
