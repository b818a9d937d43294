"""Token streams and conversations as samples of S tokens with their labels, addressed by number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

IGNORED = -100
"""The label of a position that does not count in the loss."""


class Samples(Protocol):
    """A fixed set of samples, numbered from 0."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return input ids and labels, both int64 `[len(numbers), S]`, of the samples `numbers`."""
        ...


class StreamSamples:
    """T tokens cut every S: each but the last is an input once, each but the first is a label once.

    The last sample is filled up with padding whose labels are -100.
    """

    def __init__(self, tokens: np.ndarray, sequence_length: int, padding: int) -> None:
        self._sequence_length = sequence_length
        self._num_tokens = len(tokens)
        num_samples = len(self)
        self._tokens = np.full(num_samples * sequence_length + 1, padding, dtype=tokens.dtype)
        self._tokens[: self._num_tokens] = tokens

    def __len__(self) -> int:
        """Return the number of samples: T - 1 labels, S at a time, rounded up."""
        return max(0, -(-(self._num_tokens - 1) // self._sequence_length))

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return input ids and labels, both int64 `[len(numbers), S]`, of the samples `numbers`."""
        places = numbers[:, None] * self._sequence_length + np.arange(self._sequence_length)[None]
        inputs = self._tokens[places].astype(np.int64)
        labels = self._tokens[places + 1].astype(np.int64)
        labels[places + 1 >= self._num_tokens] = IGNORED
        return inputs, labels


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Tokens that belong together (int32 `[L]`); those of answers are `learned` (bool `[L]`)."""

    tokens: np.ndarray
    learned: np.ndarray


class PackedSamples:
    """Pieces laid side by side in samples, in order: one that does not fit any more opens the next sample.

    A piece has at most S + 1 tokens. Its first token is never a label: it would follow another piece.
    """

    def __init__(self, pieces: Sequence[Piece], sequence_length: int, padding: int) -> None:
        width = sequence_length + 1
        places = _next_fit([len(piece.tokens) for piece in pieces], width)
        num_samples = places[-1][0] + 1 if places else 0
        self._tokens = np.full((num_samples, width), padding, dtype=np.int32)
        self._learned = np.zeros((num_samples, width), dtype=bool)
        for piece, (sample, start) in zip(pieces, places, strict=True):
            end = start + len(piece.tokens)
            self._tokens[sample, start:end] = piece.tokens
            self._learned[sample, start + 1 : end] = piece.learned[1:]

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._tokens)

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return input ids and labels, both int64 `[len(numbers), S]`, of the samples `numbers`."""
        tokens = self._tokens[numbers].astype(np.int64)
        labels = np.where(self._learned[numbers], tokens, IGNORED)
        return tokens[:, :-1], labels[:, 1:]


def _next_fit(lengths: Sequence[int], width: int) -> list[tuple[int, int]]:
    """Return (sample, offset) for each length, filling samples of `width` in order."""
    places, sample, offset = [], 0, 0
    for length in lengths:
        if offset + length > width:
            sample, offset = sample + 1, 0
        places.append((sample, offset))
        offset += length
    return places
