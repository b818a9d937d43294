"""`ErasureCode`: parity of equally long pieces: of pieces and parity any as many as there are pieces give all.

A Reed-Solomon code with a Cauchy matrix over GF(256) (J. Bloemer et al., "An XOR-Based Erasure-Resilient Coding
Scheme", 1995): every square part of the matrix can be inverted, so that it does not matter which ones are lost.
A product by a constant is a table of 256 bytes, by which Python translates a piece at the speed of memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

MAX_PARITY = 64
"""Most parity pieces of a group."""

MAX_GROUP = 256 - MAX_PARITY
"""Most pieces of a group."""

_POLYNOMIAL = 0x11D


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


_PRODUCT = _products()
_INVERSE = [0, *(table.index(1) for table in _PRODUCT[1:])]
_TABLE = np.frombuffer(b"".join(_PRODUCT), np.uint8).reshape(256, 256)


class ErasureCode:
    """The code of groups of `num_pieces`, 1 to `MAX_GROUP`."""

    def __init__(self, num_pieces: int) -> None:
        if not 0 < num_pieces <= MAX_GROUP:
            raise ValueError(f"a group of {num_pieces} pieces, 1 to {MAX_GROUP} are possible")
        self._num_pieces = num_pieces

    def parity(self, pieces: Mapping[int, bytes], index: int) -> bytes:
        """Return parity `index`, 0 to `MAX_PARITY` - 1, of `pieces` by their places; absent ones count as zeros."""
        factors = [_INVERSE[MAX_GROUP + index ^ place] for place in range(self._num_pieces)]
        scaled = b"".join([piece.translate(_PRODUCT[factors[place]]) for place, piece in pieces.items()])
        return _sum(scaled, len(pieces)).tobytes()

    def repair(self, pieces: Mapping[int, bytes], parity: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return the pieces that `pieces` lacks; raise `ValueError` where `parity` is not enough."""
        lost = [place for place in range(self._num_pieces) if place not in pieces]
        rows = list(parity)[: len(lost)]
        if len(rows) < len(lost):
            raise ValueError(f"{len(lost)} pieces are lost, {len(rows)} parity pieces are there")
        if not lost:
            return {}
        factors = [[_INVERSE[MAX_GROUP + row ^ place] for place in lost] for row in rows]
        known = [np.frombuffer(parity[row], np.uint8) for row in rows]
        if pieces:
            known = [one ^ np.frombuffer(self.parity(pieces, row), np.uint8) for one, row in zip(known, rows, strict=True)]
        solved = _solve(np.concatenate([np.array(factors, np.uint8), np.stack(known)], axis=1))
        return {place: row.tobytes() for place, row in zip(lost, solved, strict=True)}


def _sum(rows: bytes, count: int) -> NDArray[np.uint8]:
    total: NDArray[np.uint8] = np.bitwise_xor.reduce(np.frombuffer(rows, np.uint8).reshape(count, -1), axis=0)
    return total


def _solve(system: NDArray[np.uint8]) -> Sequence[NDArray[np.uint8]]:
    """Return the right side of a square system after Gauss's elimination; no pivot of a Cauchy matrix is zero."""
    size = len(system)
    for at in range(size):
        pivot = _TABLE[_INVERSE[system[at, at]]][system[at]]
        system ^= _TABLE[system[:, at, None], pivot]
        system[at] = pivot
    return list(system[:, size:])
