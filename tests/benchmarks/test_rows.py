"""The rows of benchmarks: the contract that `make bench` and the validation read."""

from __future__ import annotations

import json

import pytest

from benchmarks.table import Row, compared, markdown, print_rows


def test_a_row_has_exactly_the_agreed_fields(capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON object a line, with these keys in this order."""
    print_rows([Row(what="x", ours=1.0, unit="s"), Row(what="y", ours=2.0, unit="s", met=True)], as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [list(line) for line in lines] == [
        ["what", "ours", "unit", "peer", "peer_value", "ratio", "target", "met"]
    ] * 2


def test_the_ratio_is_ours_over_the_peers() -> None:
    """And none where the peer's figure is 0."""
    assert compared("x", 3.0, "s", "p", 2.0).ratio == 1.5
    assert compared("x", 3.0, "s", "p", 0.0).ratio is None


def test_a_missed_target_stands_out_and_a_bar_does_not_break_the_table() -> None:
    """The Markdown has one line per row, and as many cells as columns."""
    text = markdown([Row(what="a|b", ours=12345.6, unit="s", target="< 1 s", met=False)])
    assert text.splitlines()[2] == "| a\\|b | 12346 | s |  |  |  | < 1 s | **no** |"
