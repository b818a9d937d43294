"""`DecodeEngine`: the interface of decode engines; `check_engine` is its conformance kit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from isthmus.serve.batching.decode_records import DecodeEvent, DecodeRequest, OnSwitch, SequenceKey


class DecodeEngine(Protocol):
    """Decodes sequences in steps. One thread calls it; only `stage_weights` may be called by another meanwhile.

    A token follows from the versions of the weights that computed the sequence so far, and from seed, prompt, sample
    and position: not from what else is decoded, nor from where the sequence was before.
    """

    @property
    def version(self) -> int:
        """Return the version of the weights that decode the next step."""
        ...

    @property
    def num_sequences(self) -> int:
        """Return how many sequences have not ended."""
        ...

    def add(self, request: DecodeRequest) -> None:
        """Queue a request.

        Raises `InputError` for one that cannot be decoded, `ConflictError` for a key that is being decoded.
        """
        ...

    def stop(self, key: SequenceKey) -> None:
        """Drop a sequence without an event; raises `NotFoundError`."""
        ...

    def step(self) -> list[DecodeEvent]:
        """Decode at most one token of each sequence; `DecodingEnded` follows the last token of a response."""
        ...

    def stage_weights(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy the weights of a later version, of the shapes of the model's `state_dict`; decoding goes on meanwhile.

        Raises `InputError` for weights of another model.
        """
        ...

    def switch_weights(self, version: int, on_switch: OnSwitch) -> list[SequenceKey]:
        """Decode by staged weights from the next step on, and return the sequences that were dropped (`abort`).

        Raises `ConflictError` for a version that is not staged. Cached prefixes of other versions are not used again.
        """
        ...

    def export_sequence(self, key: SequenceKey) -> bytes:
        """Return a sequence with its cache, as it is after the last step; it goes on here until `stop`.

        Raises `NotFoundError`, and `ConflictError` for a sequence without a decoded token: there is nothing to move.
        """
        ...

    def import_sequence(self, content: bytes) -> SequenceKey:
        """Go on with a sequence that an engine of the same model, weights and arithmetic exported.

        Raises `InputError` for content that is damaged or of another engine, and errors as in `add`.
        """
        ...
