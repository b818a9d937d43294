"""Rules and known answers of grouping sequences over ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import InputError
from isthmus.plan.sequence.sequence_groups import group_sequences

pytestmark = pytest.mark.integration

lengths = st.lists(st.integers(1, 40_000), min_size=1, max_size=24)


def heaviest(groups, tokens):
    return max(-(-sum(tokens[i] for i in g.sequences) // len(g.ranks)) for g in groups)


def test_the_reports_example():
    """[24k, 8k] on 4 ranks: ranks 0 to 2 for the long sequence, rank 3 for the short one."""
    groups = group_sequences([24_000, 8_000], 4)
    assert [(g.ranks, g.sequences) for g in groups] == [((0, 1, 2), (0,)), ((3,), (1,))]


@given(lengths, st.integers(1, 16))
def test_every_sequence_is_once_somewhere_and_ranks_are_shared_by_nobody(tokens, num_ranks):
    """Sequences once, ranks at most once and in order; only a group of one rank holds several sequences."""
    groups = group_sequences(tokens, num_ranks)
    assert sorted(i for g in groups for i in g.sequences) == list(range(len(tokens)))
    ranks = [rank for g in groups for rank in g.ranks]
    assert ranks == list(range(len(ranks)))
    assert len(ranks) <= num_ranks
    assert all(len(g.ranks) == 1 or len(g.sequences) == 1 for g in groups)


@given(lengths, st.integers(1, 16))
def test_no_rank_holds_much_more_than_the_mean(tokens, num_ranks):
    """Between the mean and one rank's whole share more than twice it; never below the mean."""
    groups = group_sequences(tokens, num_ranks)
    mean = -(-sum(tokens) // num_ranks)
    assert mean <= heaviest(groups, tokens) or len(groups) < num_ranks
    assert heaviest(groups, tokens) <= 2 * -(-sum(tokens) // max(1, num_ranks - 1))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=16))
def test_short_sequences_are_not_cut(tokens):
    """With a rank for each sequence, equal ones are never cut: they need not talk at all."""
    groups = group_sequences([50] * len(tokens), len(tokens))
    assert all(len(g.ranks) == 1 for g in groups)


def test_bad_input_is_refused():
    """No ranks, no sequences, empty sequences."""
    for tokens, num_ranks in (([1], 0), ([], 1), ([0], 1)):
        with pytest.raises(InputError):
            group_sequences(tokens, num_ranks)
