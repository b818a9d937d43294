"""Rules of continuous batching: pages agree with sequences, and every request is decoded, in any order of calls."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.errors import ConflictError, InputError, NotFoundError
from isthmus.serve.batching.batch_scheduler import BatchLimits, BatchScheduler
from isthmus.serve.batching.decode_records import DecodeRequest, SequenceKey
from isthmus.serve.batching.page_pool import SCRATCH_PAGE, PagePool, first_prefix, prefix_name
from isthmus.serve.batching.step_plan import StepPlan


class RecordedCache:
    """A cache that records which token and version each slot has: what a step reads must be what it needs."""

    def __init__(self, scheduler: BatchScheduler) -> None:
        self.scheduler = scheduler
        self.slots: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.host: dict[SequenceKey, list[tuple[int, int, int]]] = {}
        self.responses: dict[SequenceKey, list[int]] = {}

    def execute(self, plan: StepPlan) -> None:
        """Move and compute rows as an engine does; each decoded token follows from its position."""
        size = self.scheduler.limits.page_tokens
        for one in plan.swapped_out:
            self.host[one.key] = [self.slots[one.pages[at // size], at % size] for at in range(one.num_rows)]
        for one in plan.swapped_in:
            for at, row in enumerate(self.host.pop(one.key)):
                self.slots[one.pages[at // size], at % size] = row
        assert sum(len(one.tokens) for one in plan.rows) <= self.scheduler.limits.step_rows
        for rows in plan.rows:
            for offset, token in enumerate(rows.tokens):
                at = rows.begin + offset
                self.slots[rows.pages[at // size], at % size] = (at, token, self.scheduler.version)
        for rows in plan.rows:
            sequence = self.scheduler.find(rows.key)
            assert SCRATCH_PAGE not in rows.pages
            for at, token in enumerate(sequence.tokens[: rows.begin + len(rows.tokens)]):
                row = self.slots[rows.pages[at // size], at % size]
                assert row[:2] == (at, token), "a row's key and value are those of its token"
                assert row[2] == self.scheduler.version or not sequence.uniform
            position = sequence.num_response
            self.scheduler.complete(rows, rows.key.prompt + position if rows.decodes else None)
            if rows.decodes:
                self.responses.setdefault(rows.key, []).append(rows.key.prompt + position)
                if position + 1 == sequence.request.max_response_tokens:
                    self.scheduler.remove(rows.key)


calls = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 3), st.integers(1, 9), st.integers(1, 8)),
        st.tuples(st.just("step")),
        st.tuples(st.just("step")),
        st.tuples(st.just("stop"), st.integers(0, 30)),
        st.tuples(st.just("switch"), st.sampled_from(["keep", "refill", "abort"])),
        st.tuples(st.just("release")),
    ),
    max_size=60,
)
limits = st.builds(
    lambda pages, size, sequences, more: BatchLimits(
        num_pages=pages, page_tokens=size, step_rows=sequences + more, max_sequences=sequences
    ),
    st.integers(6, 14), st.integers(3, 5), st.integers(1, 4), st.integers(0, 6),
)  # fmt: skip


def call(scheduler: BatchScheduler, cache: RecordedCache, one: Any, number: int) -> None:
    """Make one call of `calls`; its request number `number` has this as its key."""
    match one:
        case ("add", prompt, length, most):
            tokens = tuple((prompt, 40 + at)[at > 2] for at in range(length))
            key = SequenceKey(prompt, number)
            scheduler.add(DecodeRequest(key=key, seed=0, prompt_tokens=tokens, max_response_tokens=most))
        case ("step",):
            cache.execute(scheduler.plan_step())
        case ("stop", index) if scheduler.sequences:
            key = sorted(scheduler.sequences)[index % len(scheduler.sequences)]
            scheduler.remove(key)
            cache.host.pop(key, None)
            cache.responses.pop(key, None)
        case ("switch", on_switch):
            dropped, renewed = scheduler.switch_version(scheduler.version + 1, on_switch)
            for key in (*dropped, *renewed):
                cache.host.pop(key, None)
            for key in dropped:
                cache.responses.pop(key)
        case ("release",):
            size = scheduler.limits.page_tokens
            for moved in scheduler.swap_out_all():
                cache.host[moved.key] = [
                    cache.slots[moved.pages[at // size], at % size] for at in range(moved.num_rows)
                ]
            cache.slots.clear()
            assert scheduler.pool.num_available == scheduler.limits.num_pages - 1


@settings(max_examples=150, deadline=None)
@given(limits, calls)
def test_every_row_is_where_it_is_read_and_every_sequence_ends(sizes: BatchLimits, script: list[Any]) -> None:
    """After every call the invariants hold; whatever was called before, the remaining sequences are decoded whole."""
    scheduler = BatchScheduler(sizes)
    cache = RecordedCache(scheduler)
    for number, one in enumerate(script):
        call(scheduler, cache, one, number)
        scheduler.check()
    for _ in range(2000):
        if not scheduler.sequences:
            break
        cache.execute(scheduler.plan_step())
        scheduler.check()
    assert not scheduler.sequences
    assert not cache.host
    assert scheduler.pool.num_available == sizes.num_pages - 1
    for key, response in cache.responses.items():
        assert response == [key.prompt + at for at in range(len(response))], "no token is lost or doubled"


def test_sequences_run_in_the_order_in_which_they_came() -> None:
    """With places for two the third starts when one has ended."""
    scheduler = BatchScheduler(BatchLimits(num_pages=20, page_tokens=4, step_rows=8, max_sequences=2))
    cache = RecordedCache(scheduler)
    for number in range(3):
        key = SequenceKey(number, 0)
        scheduler.add(DecodeRequest(key=key, seed=0, prompt_tokens=(1, 2), max_response_tokens=2 + number))
    cache.execute(scheduler.plan_step())
    assert [one.request.key.prompt for one in scheduler.running] == [0, 1]
    cache.execute(scheduler.plan_step())
    cache.execute(scheduler.plan_step())
    assert [one.request.key.prompt for one in scheduler.running] == [2]


def test_requests_that_cannot_be_decoded_are_refused() -> None:
    """Each is named, and nothing is left behind."""
    scheduler = BatchScheduler(BatchLimits(num_pages=3, page_tokens=4, step_rows=8, max_sequences=2))
    request = DecodeRequest(key=SequenceKey(0, 0), seed=0, prompt_tokens=(1, 2, 3, 4, 5), max_response_tokens=4)
    scheduler.add(request)
    with pytest.raises(ConflictError, match="is being decoded"):
        scheduler.add(request)
    other = {"key": SequenceKey(1, 0), "seed": 0}
    for wrong in (
        DecodeRequest(prompt_tokens=(), max_response_tokens=4, **other),
        DecodeRequest(prompt_tokens=(1,), max_response_tokens=1, response_tokens=(2,), **other),
        DecodeRequest(prompt_tokens=(1, 2, 3, 4, 5, 6), max_response_tokens=4, **other),
    ):
        with pytest.raises(InputError):
            scheduler.add(wrong)
    with pytest.raises(InputError, match="the last token has no row yet"):
        scheduler.adopt(DecodeRequest(prompt_tokens=(1, 2), max_response_tokens=4, **other), 2, uniform=True)
    with pytest.raises(NotFoundError):
        scheduler.remove(SequenceKey(1, 0))
    assert list(scheduler.sequences) == [request.key]


@pytest.mark.parametrize(
    ("pages", "size", "rows", "sequences"), [(1, 4, 4, 1), (4, 0, 4, 1), (4, 4, 4, 5), (4, 4, 4, 0)]
)
def test_sizes_that_can_decode_nothing_are_refused(pages: int, size: int, rows: int, sequences: int) -> None:
    """At least one page beside the scratch page, and a row for each sequence."""
    with pytest.raises(InputError):
        BatchLimits(num_pages=pages, page_tokens=size, step_rows=rows, max_sequences=sequences)


def test_a_kept_prefix_gives_way_before_sequences_do() -> None:
    """The prefix that was used longest ago first; one with users stays."""
    pool = PagePool(4)
    names = [prefix_name(first_prefix(1), [number]) for number in range(3)]
    pages = [pool.take() for _ in range(3)]
    for page, name in zip(pages, names, strict=True):
        pool.name(page, name)
    pool.give_back(pages[1])
    pool.give_back(pages[0])
    assert pool.find(names[0]) == pages[0]
    assert pool.take() == pages[1]
    assert pool.find(names[1]) is None
    pool.check()
    assert len({first_prefix(1), first_prefix(2), *names}) == 5


def test_a_sequence_waits_for_room_that_others_may_grow_into() -> None:
    """Beside one of 40 rows, 13 pages of 4 are free: a page and the root of 40 squared stay, so 2 can be had, 3 not."""
    limits = BatchLimits(num_pages=24, page_tokens=4, step_rows=64, max_sequences=8)

    def admitted(prompt_tokens: int) -> bool:
        scheduler = BatchScheduler(limits)
        for number, length in enumerate((40, prompt_tokens)):
            scheduler.add(
                DecodeRequest(
                    key=SequenceKey(number, 0), seed=0, prompt_tokens=tuple(range(100 * number, 100 * number + length)),
                    max_response_tokens=8,
                )
            )  # fmt: skip
            for rows in scheduler.plan_step().rows if not number else ():
                scheduler.complete(rows, 1)
        return any(rows.key.prompt == 1 for rows in scheduler.plan_step().rows)

    assert admitted(4)
    assert not admitted(12)
