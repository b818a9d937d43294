"""What a job's placement may name."""

from __future__ import annotations

import pytest

from isthmus.control.placement import check_placement
from isthmus.core.errors import InputError
from isthmus.core.job import Placement
from tests.control.serving import EAST, POOL, WEST


@pytest.mark.parametrize(
    ("field", "word", "hint"),
    [("clusters", "eats", "did you mean 'east'?"), ("owners", "owner-wst", "did you mean 'owner-west'?"),
     ("chips", "H21", "did you mean 'H20'?")],
)  # fmt: skip
def test_a_name_that_nobody_has_is_refused_with_the_nearest(field: str, word: str, hint: str) -> None:
    """A typo is an error now, not a job that waits for ever."""
    with pytest.raises(InputError, match=f"placement.{field}: the pool knows no '{word}'") as caught:
        check_placement(Placement.model_validate({field: [word]}), (), POOL)
    assert caught.value.hint == hint


def test_what_the_file_or_an_agent_names_is_admitted() -> None:
    """Clusters of the operator's file need not have joined; those that joined need not be in a file."""
    both = Placement(clusters=("east", "west"), owners=("owner-east",), chips=("H20", "A100"))
    check_placement(both, (), POOL)
    check_placement(both, (EAST, WEST), None)


def test_while_no_cluster_is_known_any_name_may_come() -> None:
    """A server without a file, before its first agent, cannot tell a typo."""
    check_placement(Placement(clusters=("somewhere",)), (), None)
