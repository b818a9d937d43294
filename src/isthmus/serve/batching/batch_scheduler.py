"""`BatchScheduler`: continuous batching over a paged cache, pure.

Sources: iteration-level scheduling (Orca, OSDI 2022, section 3.2); pages, sharing of prefixes and swapping out of the
youngest sequences (arXiv 2309.06180, section 4); prompts in pieces beside decoding sequences (arXiv 2308.16369).

A sequence that gives way to older ones keeps its rows in host memory, so what it decodes next does not depend on it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from isthmus.core.errors import ConflictError, InputError, NotFoundError
from isthmus.serve.batching.decode_records import DecodeRequest, OnSwitch, SequenceKey
from isthmus.serve.batching.page_pool import PagePool, first_prefix, prefix_name
from isthmus.serve.batching.step_plan import CachedRows, SequenceRows, StepPlan

GROWTH_DEVIATIONS = 1.0
"""Deviations of the growth of all sequences that run for which there is room when another one is admitted."""


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """Sizes of a batch: pages of the cache with `page_tokens` rows each, rows of a step, and sequences at once."""

    num_pages: int
    page_tokens: int
    step_rows: int
    max_sequences: int

    def __post_init__(self) -> None:
        """Raise `InputError` for sizes with which nothing can be decoded."""
        if self.num_pages < 2 or self.page_tokens < 1:
            raise InputError(
                f"a cache of {self.num_pages} pages of {self.page_tokens} tokens", hint="use 2 or more, of 1 or more"
            )
        if not 1 <= self.max_sequences <= self.step_rows:
            raise InputError(
                f"{self.max_sequences} sequences at once with {self.step_rows} rows a step",
                hint="use at least one sequence, and a row for each",
            )

    @property
    def max_tokens(self) -> int:
        """Return the tokens of the longest sequence, prompt included; its last token needs no row."""
        return (self.num_pages - 1) * self.page_tokens + 1


@dataclass(kw_only=True, eq=False)
class ScheduledSequence:
    """A sequence: its tokens, the pages of its first `num_rows` rows, and the origin of these rows.

    `uniform`: all were computed by the version that decodes now. `swapped`: they are in host memory. `prefixes` names
    its first full pages. `has_decoded`: it has decoded a token here, or where its rows came from. The experts of the
    first `num_routed` rows are known to the caller.
    """

    request: DecodeRequest
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    num_rows: int = 0
    uniform: bool = True
    swapped: bool = False
    has_decoded: bool = False
    num_routed: int = 0
    prefixes: list[bytes] = field(default_factory=list)

    @property
    def num_response(self) -> int:
        """Return the tokens after the prompt."""
        return len(self.tokens) - len(self.request.prompt_tokens)

    @property
    def num_pending(self) -> int:
        """Return the rows to compute before the next token."""
        return len(self.tokens) - self.num_rows


class BatchScheduler:
    """Sequences that wait or run; of those that run, the one that was admitted last gives way."""

    def __init__(self, limits: BatchLimits, version: int = 0) -> None:
        self.limits = limits
        self.version = version
        self.pool = PagePool(limits.num_pages)
        self.sequences: dict[SequenceKey, ScheduledSequence] = {}
        self.waiting: deque[ScheduledSequence] = deque()
        self.running: list[ScheduledSequence] = []
        self.num_swaps = 0
        self.num_shared_rows = 0

    def add(self, request: DecodeRequest) -> None:
        """Queue a request; raises `InputError` for one that cannot be decoded, `ConflictError` for a key in use."""
        tokens = [*request.prompt_tokens, *request.response_tokens]
        if not 0 <= request.routed_rows <= max(len(tokens) - 1, 0):
            raise InputError(
                f"routing of {request.routed_rows} of {len(tokens)} tokens is known",
                hint="the last token has no row yet",
            )
        self._queue(ScheduledSequence(request=request, tokens=tokens, num_routed=request.routed_rows))

    def adopt(self, request: DecodeRequest, num_rows: int, uniform: bool) -> None:
        """Queue a request whose first `num_rows` rows are in host memory; errors as in `add`."""
        tokens = [*request.prompt_tokens, *request.response_tokens]
        if not 0 < num_rows < len(tokens):
            raise InputError(f"{num_rows} cached rows of {len(tokens)} tokens", hint="the last token has no row yet")
        self._queue(
            ScheduledSequence(
                request=request, tokens=tokens, num_rows=num_rows, uniform=uniform, swapped=True, has_decoded=True
            )
        )

    def find(self, key: SequenceKey) -> ScheduledSequence:
        """Return a sequence; raises `NotFoundError`."""
        if key not in self.sequences:
            raise NotFoundError(f"no sequence {tuple(key)}", hint="it has ended, or was never added")
        return self.sequences[key]

    def remove(self, key: SequenceKey) -> None:
        """Drop a sequence and its rows; raises `NotFoundError`."""
        sequence = self.find(key)
        del self.sequences[key]
        self._release(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def plan_step(self) -> StepPlan:
        """Return the next step. The caller executes it and reports each sequence of `rows` to `complete`."""
        swapped_out: list[CachedRows] = []
        rows: list[SequenceRows] = []
        budget = self.limits.step_rows
        behind = sum(1 for one in self.running if one.num_pending == 1)
        for sequence in list(self.running):
            if sequence not in self.running:
                continue
            decoding = sequence.num_pending == 1
            behind -= decoding
            count = min(sequence.num_pending, budget - behind)
            if count > 0 and self._make_room(sequence, count, swapped_out):
                rows.append(self._rows(sequence, count))
                budget -= count
        swapped_in = [] if swapped_out else self._admit(budget, rows)
        return StepPlan(swapped_out=tuple(swapped_out), swapped_in=tuple(swapped_in), rows=tuple(rows))

    def complete(self, done: SequenceRows, token: int | None) -> None:
        """Record the rows of a sequence, and the token that they decoded."""
        sequence = self.find(done.key)
        sequence.num_rows = done.begin + len(done.tokens)
        self._name_pages(sequence)
        if token is not None:
            sequence.tokens.append(token)
            sequence.has_decoded = True

    def swap_out_all(self) -> list[CachedRows]:
        """Free all pages; the caller copies the rows of these sequences to host memory before it computes others."""
        swapped_out: list[CachedRows] = []
        while self.running:
            self._swap_out(self.running[-1], swapped_out)
        self.pool.forget_prefixes()
        return swapped_out

    def switch_version(self, version: int, on_switch: OnSwitch) -> tuple[list[SequenceKey], list[SequenceKey]]:
        """Decode by other weights from the next step on; return the dropped sequences, and those without rows.

        A sequence that has not decoded any token here begins again in any case, and so does one that has fewer rows
        than its tokens need: what it decodes must not depend on how far a batch happened to be.
        """
        self.version = version
        dropped, renewed = [], []
        for sequence in self.sequences.values():
            if on_switch == "abort" and sequence.num_response:
                dropped.append(sequence.request.key)
            elif on_switch == "keep" and sequence.has_decoded and sequence.num_pending == 1:
                sequence.uniform = False
            else:
                self._release(sequence)
                sequence.num_rows, sequence.swapped, sequence.uniform = 0, False, True
                renewed.append(sequence.request.key)
            sequence.prefixes.clear()
        for key in dropped:
            self.remove(key)
        self.pool.forget_prefixes()
        return dropped, renewed

    def check(self) -> None:
        """Raise `AssertionError` unless pages and sequences agree."""
        self.pool.check()
        users: dict[int, int] = {}
        if sorted(self.sequences) != sorted(one.request.key for one in (*self.running, *self.waiting)):
            raise AssertionError("a sequence neither waits nor runs")
        for sequence in self.sequences.values():
            for page in sequence.pages:
                users[page] = users.get(page, 0) + 1
            if not sequence.swapped and len(sequence.pages) * self.limits.page_tokens < sequence.num_rows:
                raise AssertionError(f"{sequence.request.key} has {sequence.num_rows} rows in {sequence.pages}")
        if users != self.pool.num_users:
            raise AssertionError(f"pages have users {self.pool.num_users}, sequences use {users}")
        if any(one.pages for one in self.waiting) or any(one.swapped for one in self.running):
            raise AssertionError("a sequence that waits has pages, or one that runs has its rows in host memory")
        if len(self.running) > self.limits.max_sequences:
            raise AssertionError(f"{len(self.running)} sequences run at once")

    def _queue(self, sequence: ScheduledSequence) -> None:
        request = sequence.request
        if request.key in self.sequences:
            raise ConflictError(f"sequence {tuple(request.key)} is being decoded", hint="stop it first")
        if not request.prompt_tokens or request.max_response_tokens <= len(request.response_tokens):
            raise InputError(
                f"{len(request.prompt_tokens)} prompt tokens and {len(request.response_tokens)} of at most "
                f"{request.max_response_tokens} response tokens",
                hint="use a prompt, and leave at least one token to decode",
            )
        num_tokens = len(request.prompt_tokens) + request.max_response_tokens
        if num_tokens > self.limits.max_tokens:
            raise InputError(
                f"a prompt of {len(request.prompt_tokens)} and up to {request.max_response_tokens} response tokens",
                hint=f"the cache holds sequences of at most {self.limits.max_tokens}",
            )
        self.sequences[request.key] = sequence
        self.waiting.append(sequence)

    def _make_room(self, sequence: ScheduledSequence, count: int, swapped_out: list[CachedRows]) -> bool:
        """Give a running sequence the pages of `count` rows more; False where it had to give way itself."""
        while self._num_missing(sequence, count) > self.pool.num_available:
            youngest = self.running[-1]
            self._swap_out(youngest, swapped_out)
            if youngest is sequence:
                return False
        self._take_pages(sequence, count)
        return True

    def _admit(self, budget: int, rows: list[SequenceRows]) -> list[CachedRows]:
        """Start waiting sequences in order, while there are places, rows and a page more for each that runs."""
        swapped_in = []
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_sequences:
            sequence = self.waiting[0]
            if not sequence.swapped:
                self._find_prefix(sequence)
            count = min(sequence.num_pending, budget)
            if self._num_missing(sequence, count) + self._num_reserved() > self.pool.num_available:
                self._release(sequence)
                sequence.num_rows = sequence.num_rows if sequence.swapped else 0
                break
            self._take_pages(sequence, count)
            if sequence.swapped:
                sequence.swapped = False
                swapped_in.append(self._cached(sequence))
            else:
                self.num_shared_rows += sequence.num_rows
            self.running.append(self.waiting.popleft())
            rows.append(self._rows(sequence, count))
            budget -= count
        return swapped_in

    def _num_reserved(self) -> int:
        """Return the pages to leave to those that run: one each, and what their growth together exceeds its mean by.

        Of lengths like those of responses a sequence is about as likely to end as to double, so the sum of what they
        have stays as it is, with a deviation of the root of the sum of squares.
        """
        rows = math.hypot(*(one.num_rows for one in self.running)) * GROWTH_DEVIATIONS
        return len(self.running) + math.ceil(rows / self.limits.page_tokens)

    def _find_prefix(self, sequence: ScheduledSequence) -> None:
        """Share the pages that hold the first tokens; the last token is always computed, as it decodes the next."""
        size = self.limits.page_tokens
        prefix = first_prefix(self.version)
        sequence.prefixes.clear()
        for end in range(size, len(sequence.tokens), size):
            prefix = prefix_name(prefix, sequence.tokens[end - size : end])
            page = self.pool.find(prefix)
            if page is None:
                break
            sequence.pages.append(page)
            sequence.prefixes.append(prefix)
        sequence.num_rows = len(sequence.pages) * size

    def _name_pages(self, sequence: ScheduledSequence) -> None:
        """Let other sequences find the full pages, if the present version has computed all rows."""
        size = self.limits.page_tokens
        while sequence.uniform and (len(sequence.prefixes) + 1) * size <= sequence.num_rows:
            number = len(sequence.prefixes)
            before = sequence.prefixes[-1] if number else first_prefix(self.version)
            sequence.prefixes.append(prefix_name(before, sequence.tokens[number * size : (number + 1) * size]))
            self.pool.name(sequence.pages[number], sequence.prefixes[-1])

    def _swap_out(self, sequence: ScheduledSequence, swapped_out: list[CachedRows]) -> None:
        """Put a running sequence back in front of those that wait; its rows move to host memory."""
        if sequence.num_rows:
            swapped_out.append(self._cached(sequence))
            sequence.swapped = True
            self.num_swaps += 1
        self._release(sequence)
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)

    def _num_missing(self, sequence: ScheduledSequence, count: int) -> int:
        return -(-(sequence.num_rows + count) // self.limits.page_tokens) - len(sequence.pages)

    def _take_pages(self, sequence: ScheduledSequence, count: int) -> None:
        sequence.pages.extend(self.pool.take() for _ in range(self._num_missing(sequence, count)))

    def _release(self, sequence: ScheduledSequence) -> None:
        for page in reversed(sequence.pages):
            self.pool.give_back(page)
        sequence.pages.clear()
        sequence.prefixes.clear()

    def _cached(self, sequence: ScheduledSequence) -> CachedRows:
        num_pages = -(-sequence.num_rows // self.limits.page_tokens)
        return CachedRows(key=sequence.request.key, pages=tuple(sequence.pages[:num_pages]), num_rows=sequence.num_rows)

    def _rows(self, sequence: ScheduledSequence, count: int) -> SequenceRows:
        begin, end = sequence.num_rows, sequence.num_rows + count
        return SequenceRows(
            key=sequence.request.key, begin=begin, tokens=tuple(sequence.tokens[begin:end]),
            pages=tuple(sequence.pages), decodes=end == len(sequence.tokens),
        )  # fmt: skip
