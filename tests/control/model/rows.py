"""`LocalRows` and `Books`: lists of integers by number, and integers by key, looked up many at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Rows:
    """Row n holds any number of entries of `width` integers each."""

    def __init__(self, width: int) -> None:
        self._entries = np.empty((1024, width), dtype=np.int32)
        self._starts = np.zeros(1024, dtype=np.int64)
        self.num_rows = self.num_entries = 0

    def add(self, entries: Sequence[Sequence[int]]) -> int:
        """Append a row; return its number."""
        end = self.num_entries + len(entries)
        while end > len(self._entries):
            self._entries = np.concatenate((self._entries, np.empty_like(self._entries)))
        if self.num_rows + 2 > len(self._starts):
            self._starts = np.concatenate((self._starts, np.zeros_like(self._starts)))
        if entries:
            self._entries[self.num_entries : end] = entries
        self.num_rows, self.num_entries = self.num_rows + 1, end
        self._starts[self.num_rows] = end
        return self.num_rows - 1

    def gather(self, rows: Ints) -> tuple[Ints, npt.NDArray[np.int32]]:
        """Return the entries of `rows`, [entries, width], and for each the place in `rows` that it is of."""
        begins = self._starts[rows]
        counts = self._starts[rows + 1] - begins
        of = np.repeat(np.arange(len(rows)), counts)
        first = np.cumsum(counts) - counts
        return of, self._entries[np.arange(len(of)) - first[of] + begins[of]]


class Books:
    """What was worked out of each key, book by book."""

    def __init__(self) -> None:
        self._books: dict[str, dict[int, int]] = {}

    def look_up(self, book: str, keys: Ints, work_out: Callable[[int], int]) -> Ints:
        """Return what `work_out` says of each key; it is asked about each key once."""
        pages = self._books.setdefault(book, {})
        unique, inverse = np.unique(keys, return_inverse=True)
        found = []
        for key in unique.tolist():
            value = pages.get(key)
            if value is None:
                value = pages[key] = work_out(key)
            found.append(value)
        return np.array(found, dtype=np.int64)[inverse]
