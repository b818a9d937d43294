"""Rules of the layer matrix and of merging small layers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.plan.profile.layer_matrix import (
    communication_matrix,
    layer_matrix,
    merge_small_layers,
    render_layer_matrix,
)
from isthmus.plan.profile.model_profile import profile_model
from tests.plan.published import NAMES, published


@pytest.mark.parametrize("name", NAMES)
def test_rows_add_up_to_the_model(name):
    """Count times row, over the rows, is the whole model: parameters and operations."""
    profile = profile_model(published(name))
    rows = layer_matrix(profile, sequence_length=2048, num_tokens=4096)
    assert sum(row.count * row.parameters for row in rows) == profile.num_parameters
    flops = sum(row.count * row.forward_flops for row in rows)
    assert flops == pytest.approx(profile.forward_flops(2048, 4096))


def test_intensity_tells_compute_from_memory():
    """At one token everything waits for memory; at many, matrix products do work on each byte; norms never
    do.
    """

    def rows(tokens):
        profile = profile_model(published("llama-3.1-8b"))
        return {row.kind: row for row in layer_matrix(profile, sequence_length=4096, num_tokens=tokens)}

    assert rows(1)["dense"].intensity < 2
    assert rows(8192)["dense"].intensity > 500
    assert rows(8192)["norm"].intensity == 0


def test_what_is_sent_is_the_hidden_state_and_the_head_sends_nothing():
    """A cut behind any part but the head costs one hidden state a token."""
    profile = profile_model(published("llama-2-7b"))
    rows = layer_matrix(profile, sequence_length=1024, num_tokens=1024)
    assert {row.sent_bytes for row in rows if row.kind != "head"} == {1024 * 4096 * 2}
    assert rows[-1].sent_bytes == 0


def test_layers_are_a_chain():
    """Between layers only the next one receives."""
    profile = profile_model(published("llama-3.2-1b"))
    matrix = communication_matrix(profile, 10)
    sent = {(i, j) for i, row in enumerate(matrix) for j, size in enumerate(row) if size}
    assert sent == {(i, i + 1) for i in range(15)}


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=30), st.floats(0.1, 20))
def test_merged_ranges_cover_all_layers_once_and_none_is_small(costs_s, smallest_s):
    """Ranges follow each other; each costs at least the smallest, unless all layers together do not."""
    ranges = merge_small_layers(costs_s, smallest_s)
    assert [index for first, last in ranges for index in range(first, last)] == list(range(len(costs_s)))
    if len(ranges) > 1:
        assert all(sum(costs_s[first:last]) >= smallest_s * (1 - 1e-9) for first, last in ranges)


def test_the_printed_matrix_has_a_line_for_every_row():
    """Two lines of head, then one a row, each with its name first."""
    rows = layer_matrix(profile_model(published("deepseek-v3")), sequence_length=4096, num_tokens=4096)
    lines = render_layer_matrix(rows).splitlines()
    assert len(lines) == len(rows) + 2
    assert [line.startswith(row.name) for line, row in zip(lines[2:], rows, strict=True)] == [True] * len(rows)
