"""What a step of a decode engine does: rows to compute, and sequences whose cache moves to host memory or back."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.serve.batching.decode_records import SequenceKey


@dataclass(frozen=True, kw_only=True)
class CachedRows:
    """The first `num_rows` rows of a sequence's cache, in `pages` in order."""

    key: SequenceKey
    pages: tuple[int, ...]
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class SequenceRows:
    """Rows `begin` to `begin + len(tokens) - 1` of a sequence with `pages`; the last decodes if `decodes`.

    Row i computes token i and keeps its key and value at slot `i % page_tokens` of page `i // page_tokens`.
    """

    key: SequenceKey
    begin: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    decodes: bool


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """In this order: copy `swapped_out` to host memory, write `swapped_in` back, compute `rows`."""

    swapped_out: tuple[CachedRows, ...]
    swapped_in: tuple[CachedRows, ...]
    rows: tuple[SequenceRows, ...]
