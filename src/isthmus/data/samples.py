"""Samples of S tokens with labels, addressed by number, from token streams or conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

IGNORE_INDEX = -100
"""Label of a position that the loss ignores (PyTorch's `ignore_index`)."""


class Samples(Protocol):
    """A fixed set of samples, numbered from 0."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return input ids and labels, both int64 `[len(numbers), S]`, of the samples `numbers`."""
        ...


class StreamSamples:
    """A stream of T tokens (int `[T]`) cut every S: the labels are the inputs shifted by one token.

    The last sample is padded; padding has label -100.
    """

    def __init__(self, tokens: np.ndarray, sequence_length: int, padding_id: int) -> None:
        self._sequence_length = sequence_length
        self._num_tokens = len(tokens)
        num_samples = len(self)
        self._tokens = np.full(num_samples * sequence_length + 1, padding_id, dtype=tokens.dtype)
        self._tokens[: self._num_tokens] = tokens

    def __len__(self) -> int:
        """Return the number of samples: ceil((T - 1) / S)."""
        return max(0, -(-(self._num_tokens - 1) // self._sequence_length))

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return input ids and labels, both int64 `[len(numbers), S]`, of the samples `numbers`."""
        positions = numbers[:, None] * self._sequence_length + np.arange(self._sequence_length)[None]
        inputs = self._tokens[positions].astype(np.int64)
        labels = self._tokens[positions + 1].astype(np.int64)
        labels[positions + 1 >= self._num_tokens] = IGNORE_INDEX
        return inputs, labels


@dataclass(frozen=True, kw_only=True)
class TokenSequence:
    """Tokens that are kept together in a sample."""

    tokens: np.ndarray
    """int32 `[L]`."""
    loss_mask: np.ndarray
    """bool `[L]`: whether the loss covers the token (answers)."""


class PackedSamples:
    """Token sequences packed into samples in order (next fit).

    A sequence has at most S + 1 tokens. Its first token is never a label, since it may follow another
    sequence.
    """

    def __init__(self, sequences: Sequence[TokenSequence], sequence_length: int, padding_id: int) -> None:
        width = sequence_length + 1
        positions = _next_fit([len(piece.tokens) for piece in sequences], width)
        num_samples = positions[-1][0] + 1 if positions else 0
        self._tokens = np.full((num_samples, width), padding_id, dtype=np.int32)
        self._loss_mask = np.zeros((num_samples, width), dtype=bool)
        for piece, (sample, start) in zip(sequences, positions, strict=True):
            end = start + len(piece.tokens)
            self._tokens[sample, start:end] = piece.tokens
            self._loss_mask[sample, start + 1 : end] = piece.loss_mask[1:]

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._tokens)

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return input ids and labels, both int64 `[len(numbers), S]`, of the samples `numbers`."""
        tokens = self._tokens[numbers].astype(np.int64)
        labels = np.where(self._loss_mask[numbers], tokens, IGNORE_INDEX)
        return tokens[:, :-1], labels[:, 1:]


def _next_fit(lengths: Sequence[int], capacity: int) -> list[tuple[int, int]]:
    """Return (sample, offset) for each length by next-fit packing into samples of `capacity` tokens."""
    positions, sample, offset = [], 0, 0
    for length in lengths:
        if offset + length > capacity:
            sample, offset = sample + 1, 0
        positions.append((sample, offset))
        offset += length
    return positions
