"""`PagePool`: pages of a paged key-value cache, and which of them hold a prefix for reuse.

Source: paged attention (arXiv 2309.06180, sections 4.2 to 4.4). A full page is named by the version of the weights and
by all tokens up to its end, so that a prefix never serves under other weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

SCRATCH_PAGE = 0
"""Rows that pad a tile are written here; no sequence has it."""


class PagePool:
    """Pages 1 to `num_pages - 1`; each is free, used by one or more sequences, or kept for its prefix until needed."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_users: dict[int, int] = {}
        self.free = list(range(num_pages - 1, SCRATCH_PAGE, -1))
        # Pages without a user that have a prefix; the one that was left longest ago is first.
        self.kept: dict[int, None] = {}
        self._page_of: dict[bytes, int] = {}
        self._prefix_of: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        """Return how many pages `take` can give."""
        return len(self.free) + len(self.kept)

    def take(self) -> int:
        """Return a page with one user: a free one, or the one whose prefix was used longest ago.

        Raises `IndexError` where none is available.
        """
        if not self.free and self.kept:
            page = next(iter(self.kept))
            del self.kept[page]
            self._forget(page)
            self.free.append(page)
        page = self.free.pop()
        self.num_users[page] = 1
        return page

    def find(self, prefix: bytes) -> int | None:
        """Return the page of `prefix` with one user more, or None."""
        page = self._page_of.get(prefix)
        if page is not None:
            self.kept.pop(page, None)
            self.num_users[page] = self.num_users.get(page, 0) + 1
        return page

    def name(self, page: int, prefix: bytes) -> None:
        """Let `page` be found by `prefix`, unless another page has it already."""
        if prefix not in self._page_of and page not in self._prefix_of:
            self._page_of[prefix] = page
            self._prefix_of[page] = prefix

    def give_back(self, page: int) -> None:
        """Take one user from `page`."""
        self.num_users[page] -= 1
        if self.num_users[page] == 0:
            del self.num_users[page]
            if page in self._prefix_of:
                self.kept[page] = None
            else:
                self.free.append(page)

    def forget_prefixes(self) -> None:
        """Free the kept pages: no prefix is found until pages are named again."""
        self.free.extend(self.kept)
        self.kept.clear()
        self._page_of.clear()
        self._prefix_of.clear()

    def check(self) -> None:
        """Raise `AssertionError` unless each page is free, used or kept, and in one of these states only."""
        pages = [*self.free, *self.num_users, *self.kept]
        if sorted(pages) != list(range(1, self.num_pages)) or min(self.num_users.values(), default=1) < 1:
            raise AssertionError(f"pages are lost or doubled: {sorted(pages)}")
        if {page: prefix for prefix, page in self._page_of.items()} != self._prefix_of:
            raise AssertionError("a prefix and its page differ")

    def _forget(self, page: int) -> None:
        prefix = self._prefix_of.pop(page, None)
        if prefix is not None:
            del self._page_of[prefix]


def prefix_name(before: bytes, tokens: Sequence[int]) -> bytes:
    """Return the name of a page with `tokens` after the pages that `before` names (`first_prefix` where none are)."""
    return hashlib.sha256(before + b"".join(one.to_bytes(8, "little") for one in tokens)).digest()


def first_prefix(version: int) -> bytes:
    """Return the name of the empty prefix under weights `version`."""
    return hashlib.sha256(b"isthmus prefix 1\0" + version.to_bytes(8, "little")).digest()
