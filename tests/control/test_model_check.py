"""The commit protocol, model-checked: every state that the real coordinator and agents can get into.

`docs/design/model-check.md` says what is modelled; `python -m benchmarks.model_check` runs more of it, and
`test_model_reduction.py` tries what the fast form counts on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.control.model.explore import Step, explore
from tests.control.model.scenario import QUICK, Scenario
from tests.control.model.sweep import sweep


@dataclass
class Lights:
    """Two lights at a crossing: each turns green when it likes, or only while the other is red."""

    careful: bool = True
    breaks: bool = False

    def start(self) -> str:
        return "rr"

    def steps(self, state: str) -> Iterator[Step[str]]:
        for light in (0, 1):
            if state[light] == "r" and (not self.careful or state[1 - light] != "g"):
                yield Step(f"{light} turns green", _turned(state, light, "g"))
            if state[light] == "g":
                yield Step(f"{light} turns red", _turned(state, light, "r"))
                if self.breaks:
                    yield Step(f"{light} breaks", _turned(state, light, "b"), fault=True)

    def key(self, state: str) -> str:
        return state

    def wrong(self, state: str) -> str:
        return "both are green" if state == "gg" else ""

    def is_goal(self, state: str) -> bool:
        return "g" in state


def _turned(state: str, light: int, colour: str) -> str:
    return "".join(colour if other == light else old for other, old in enumerate(state))


def test_the_explorer_finds_all_states_and_the_shortest_way_to_a_wrong_one() -> None:
    """Three states of careful lights; two steps to a crash of careless ones."""
    found = explore(Lights())
    assert (found.num_states, found.num_steps, found.wrong) == (3, 4, "")
    crash = explore(Lights(careful=False))
    assert (crash.wrong, crash.trace) == ("both are green", ["0 turns green", "1 turns green"])


def test_the_explorer_finds_where_no_goal_can_be_reached_any_more() -> None:
    """With both lights broken none will ever be green: a fault may not help out."""
    found = explore(Lights(breaks=True))
    assert found.wrong == "no goal can be reached from here without a fault"
    assert len(found.trace) == 4
    assert found.trace[-1].endswith("breaks")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", QUICK, ids=str)
def test_the_protocol_keeps_its_invariants_and_always_comes_to_an_end(scenario: Scenario) -> None:
    """In every reachable state the invariants hold; all jobs can still end and leave no device allocated."""
    found = sweep(scenario)
    assert found.wrong == "", "\n".join(found.trace)
    assert found.num_goals > 0
