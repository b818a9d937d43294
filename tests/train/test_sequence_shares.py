"""Rules of tokens shared by ranks: each once, equal work, and tiles that cover exactly what attention needs."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import PlanError
from isthmus.train.context_parallel.attention_tiles import attention_tiles
from isthmus.train.context_parallel.merge_attention import merge_attention
from isthmus.train.context_parallel.sequence_shares import SequenceShare, share_sequence

WEIGHTS = st.lists(st.sampled_from([1.0, 1.5, 2.0, 3.0, 7.0]), min_size=1, max_size=8)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[int, list[float], int]:
    """Draw tokens, weights and a multiple that can be shared."""
    weights, multiple = draw(WEIGHTS), draw(st.sampled_from([1, 2, 4]))
    return multiple * draw(st.integers(len(weights), 80)), weights, multiple


@given(sequences())
def test_each_token_is_at_one_rank_in_order(sequence: tuple[int, list[float], int]) -> None:
    """All positions occur once over all ranks, ascending at each; a share is a multiple, in one or two segments."""
    tokens, weights, multiple = sequence
    shares = share_sequence(tokens, weights, multiple)
    held = [list(share.positions) for share in shares]
    assert sorted(itertools.chain(*held)) == list(range(tokens))
    for share, positions in zip(shares, held, strict=True):
        assert positions == sorted(positions)
        assert share.num_tokens == len(positions) > 0
        assert share.num_tokens % multiple == 0
        assert len(share.segments) <= 2
        assert all(one[1] < other[0] for one, other in itertools.pairwise(share.segments))


@given(sequences())
def test_causal_work_is_in_proportion_to_tokens(sequence: tuple[int, list[float], int]) -> None:
    """A rank's products of queries and keys are those of its number of tokens at the middle, up to one row of each."""
    tokens, weights, multiple = sequence
    for share in share_sequence(tokens, weights, multiple):
        work = sum(position + 1 for position in share.positions)
        assert abs(work - share.num_tokens * (tokens + 1) / 2) <= tokens / 2 + share.num_tokens


def test_shares_follow_weights() -> None:
    """A chip of three times the speed takes three times the tokens, in the same balance."""
    shares = share_sequence(64, [3.0, 1.0])
    assert [share.segments for share in shares] == [((0, 24), (40, 64)), ((24, 40),)]
    assert [share.num_tokens for share in share_sequence(10, [1.0, 1.0, 1.0])] == [4, 3, 3]


@pytest.mark.parametrize(("tokens", "weights", "multiple"), [(3, [1.0] * 4, 1), (10, [1.0], 4), (8, [1.0, 0.0], 1)])
def test_impossible_shares_are_refused(tokens: int, weights: list[float], multiple: int) -> None:
    """Too few tokens, a multiple that does not divide them, a rank without weight."""
    with pytest.raises(PlanError, match=f"{tokens} tokens cannot be shared"):
        share_sequence(tokens, weights, multiple)


@st.composite
def attentions(draw: st.DrawFn) -> tuple[int, list[float], tuple[int, ...], int | None]:
    """Draw tokens, weights, the ends of documents, and a window or none."""
    tokens, weights, _ = draw(sequences().filter(lambda one: one[0] < 60))
    inner = draw(st.sets(st.integers(1, tokens - 1), max_size=4)) if tokens > 1 else set()
    window = draw(st.none() | st.integers(1, tokens))
    return tokens, weights, (0, *sorted(inner), tokens), window


@given(attentions())
def test_tiles_cover_what_attention_needs_once(case: tuple[int, list[float], tuple[int, ...], int | None]) -> None:
    """Each needed product is in one tile, each other in none, between any two ranks and for gathered keys."""
    tokens, weights, documents, window = case
    shares = share_sequence(tokens, weights)
    of_token = [sum(end <= at for end in documents[1:]) for at in range(tokens)]
    whole = SequenceShare(((0, tokens),))
    for queries, keys in itertools.product(shares, (*shares, whole)):
        products: list[tuple[int, int]] = []
        for tile in attention_tiles(queries, keys, documents, window):
            for row, column in itertools.product(range(*tile.queries), range(*tile.keys)):
                query, key = queries.positions[row], keys.positions[column]
                if not (tile.is_causal and key > query) and not (tile.is_masked and query - key >= (window or 0)):
                    products.append((query, key))
        needed = [
            (query, key)
            for query, key in itertools.product(queries.positions, keys.positions)
            if key <= query and of_token[key] == of_token[query] and (window is None or query - key < window)
        ]
        assert sorted(products) == needed


def test_head_and_tail_need_one_tile_per_peer() -> None:
    """Between two ranks half of the products are needed, as one whole rectangle; a rank's own are one causal square."""
    shares = share_sequence(64, [1.0] * 4)
    for (i, queries), (j, keys) in itertools.product(enumerate(shares), enumerate(shares)):
        (tile,) = attention_tiles(queries, keys, (0, 64))
        area = (tile.queries[1] - tile.queries[0]) * (tile.keys[1] - tile.keys[0])
        assert (tile.is_causal, area) == ((True, 256) if i == j else (False, 128))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**16))
def test_merged_attention_is_that_over_all_keys(first: int, second: int, seed: int) -> None:
    """Attention over two sets of keys, merged by their log-sum-exps, is attention over both."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, first + second, dtype=torch.float64, generator=generator) * 10
    values = torch.randn(first + second, 5, dtype=torch.float64, generator=generator)
    parts = scores.split([first, second], 1), values.split([first, second])
    results = [(part.softmax(1) @ value, part.logsumexp(1)) for part, value in zip(*parts, strict=True)]
    found, log_sum = merge_attention(*results[0], *results[1])
    torch.testing.assert_close(found, scores.softmax(1) @ values)
    torch.testing.assert_close(log_sum, scores.logsumexp(1))
