"""Rules of the comparison of steps with keys and without: pairs by turns, and keys that sites share in pairs."""

from __future__ import annotations

import pytest

from benchmarks._real_pipeline import Timed
from benchmarks._trust_steps import new_keys, rows_of


def test_a_slower_machine_from_pair_to_pair_changes_no_figure() -> None:
    """The figure is the median of the ratios of pairs, not the ratio of medians."""
    pairs = [(Timed(1.0 * slower, 2.0), Timed(1.02 * slower, 2.001)) for slower in (1, 2, 3, 5)]
    longer, more = rows_of(pairs, 5)
    assert longer.ours == pytest.approx(2.0)
    assert longer.met is False
    assert more.ours == pytest.approx(1.0)


def test_each_pair_of_sites_shares_one_key() -> None:
    """Sites name the same key for each other, and no two pairs have the same one."""
    keys = new_keys(("a", "b", "c"))
    assert keys["a"].keys["b"] == keys["b"].keys["a"]
    assert len({key for one in keys.values() for key in one.keys.values()}) == 6
