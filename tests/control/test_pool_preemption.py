"""Joint preemption over five simulated owners, as `python -m benchmarks.control_plane` measures it."""

from __future__ import annotations

import pytest

from benchmarks._joint_preemption import CHECKPOINT_S, preempt_once


@pytest.mark.parametrize("seed", range(3))
def test_five_owners_are_ready_within_half_a_second_and_nobody_goes_in_vain(seed: int) -> None:
    """All get ready together, every victim saves first, eight make way for eight nodes, and then it runs."""
    once = preempt_once(seed)
    assert 0 < once.prepare_s <= 0.5
    assert 0 < once.commit_s <= 2 < CHECKPOINT_S
    assert (once.victims, once.needless) == (8, 0)
