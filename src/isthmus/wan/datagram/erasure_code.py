"""`ErasureCode`: parity of equally long pieces: of pieces and parity any as many as there are pieces give all.

A Reed-Solomon code with a Cauchy matrix over GF(256) (J. Bloemer et al., "An XOR-Based Erasure-Resilient Coding
Scheme", 1995): every square part of the matrix can be inverted, so that it does not matter which ones are lost.
Eight parity pieces are summed at once: a table gives for each place and each byte its eight products.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

MAX_PARITY = 64
"""Most parity pieces of a group."""

MAX_GROUP = 256 - MAX_PARITY
"""Most pieces of a group."""

_POLYNOMIAL = 0x11D
_LANES = 8
_CHUNK = 16
"""Pieces that are looked up at once, so that what is found stays in the cache."""


def _products() -> list[bytes]:
    """Return for each constant the table of its products."""
    powers, logarithms, value = [0] * 510, [0] * 256, 1
    for exponent in range(255):
        powers[exponent] = powers[exponent + 255] = value
        logarithms[value] = exponent
        value <<= 1
        value ^= _POLYNOMIAL if value & 256 else 0
    logs = logarithms[1:]
    return [bytes(256), *(bytes([0, *(powers[log + other] for other in logs)]) for log in logs)]


_TABLE = np.frombuffer(b"".join(_products()), np.uint8).reshape(256, 256)
_INVERSE = [0, *(int(row.argmax()) for row in (_TABLE[1:] == 1))]


class ErasureCode:
    """The code of groups of `num_pieces`, 1 to `MAX_GROUP`, of `piece_bytes` each."""

    def __init__(self, num_pieces: int, piece_bytes: int) -> None:
        if not 0 < num_pieces <= MAX_GROUP:
            raise ValueError(f"a group of {num_pieces} pieces, 1 to {MAX_GROUP} are possible")
        self._num_pieces, self._piece_bytes = num_pieces, piece_bytes

    def parity(self, data: bytes, count: int) -> list[bytes]:
        """Return the first `count` parity pieces of `data`, the pieces one after the other; the end may be short."""
        padded = data.ljust(self._num_pieces * self._piece_bytes, b"\0")
        return [row.tobytes() for row in self._rows(padded, range(self._num_pieces), range(count))]

    def repair(self, pieces: Mapping[int, bytes | memoryview], parity: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return the pieces that `pieces` lacks, by their places; raise `ValueError` where `parity` is not enough."""
        lost = [place for place in range(self._num_pieces) if place not in pieces]
        indices = list(parity)[: len(lost)]
        if len(indices) < len(lost):
            raise ValueError(f"{len(lost)} pieces are lost, {len(indices)} parity pieces are there")
        if not lost:
            return {}
        known = b"".join([bytes(piece).ljust(self._piece_bytes, b"\0") for piece in pieces.values()])
        rows = self._rows(known, list(pieces), indices)
        right = [np.frombuffer(parity[index], np.uint8) ^ row for index, row in zip(indices, rows, strict=True)]
        factors = np.array([[_INVERSE[MAX_GROUP + index ^ place] for place in lost] for index in indices], np.uint8)
        solved = _solve(np.concatenate([factors, np.stack(right)], axis=1))
        return {place: row.tobytes() for place, row in zip(lost, solved, strict=True)}

    def _rows(self, pieces: bytes, places: Sequence[int], indices: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Return what `pieces` at `places` add to the parity of `indices`."""
        found = {block: self._block(pieces, places, block) for block in {index // _LANES for index in indices}}
        return [found[index // _LANES][index % _LANES] for index in indices]

    def _block(self, pieces: bytes, places: Sequence[int], block: int) -> NDArray[np.uint8]:
        data = np.frombuffer(pieces, np.uint8).reshape(-1, self._piece_bytes)
        starts, table = np.array(places, np.uint16)[:, None] * np.uint16(256), _products_of(block)
        total = np.zeros(self._piece_bytes, np.uint64)
        for at in range(0, len(data), _CHUNK):
            total ^= np.bitwise_xor.reduce(table.take(data[at : at + _CHUNK] + starts[at : at + _CHUNK]), axis=0)
        return total.view(np.uint8).reshape(-1, _LANES).T


@functools.cache
def _products_of(block: int) -> NDArray[np.uint64]:
    """Return for each place and byte the products that it adds to the parity pieces of a block, as bytes of a word."""
    factors = [
        [_INVERSE[MAX_GROUP + block * _LANES + lane ^ place] for lane in range(_LANES)] for place in range(MAX_GROUP)
    ]
    return np.ascontiguousarray(_TABLE[np.array(factors)].transpose(0, 2, 1)).view(np.uint64).reshape(-1)


def _solve(system: NDArray[np.uint8]) -> Sequence[NDArray[np.uint8]]:
    """Return the right side of a square system after Gauss's elimination; no pivot of a Cauchy matrix is zero."""
    size = len(system)
    for at in range(size):
        pivot = _TABLE[_INVERSE[system[at, at]]][system[at]]
        system ^= _TABLE[system[:, at, None], pivot]
        system[at] = pivot
    return list(system[:, size:])
