"""What a job's placement may name, and what no job may ask for."""

from __future__ import annotations

import pytest

from isthmus.control.placement import check_clusters, check_degrees, check_output_site, check_placement_names
from isthmus.core.errors import InputError, IsthmusError, ModelError, PlanError
from isthmus.core.job import PlacementConstraints
from tests.control.serving import EAST, MODEL, POOL, WEST, job
from tests.plan.published import published


@pytest.mark.parametrize(
    ("field", "word", "hint"),
    [("clusters", "eats", "did you mean 'east'?"), ("owners", "owner-wst", "did you mean 'owner-west'?"),
     ("chips", "H21", "did you mean 'H20'?")],
)  # fmt: skip
def test_a_name_that_nobody_has_is_refused_with_the_nearest(field: str, word: str, hint: str) -> None:
    """A typo is an error at submission, not a job that waits without end."""
    with pytest.raises(InputError, match=f"placement.{field}: the pool has no '{word}'") as caught:
        check_placement_names(PlacementConstraints.model_validate({field: [word]}), (), POOL)
    assert caught.value.hint == hint


def test_a_site_for_the_model_that_does_not_exist_is_refused_with_the_nearest() -> None:
    """A typo in `output_site` is an error at submission; before the first agent of a server without a file, none."""
    with pytest.raises(InputError, match="output_site: the pool has no site 'wets'") as caught:
        check_output_site("wets", (), POOL)
    assert caught.value.hint == "did you mean 'west'?"
    check_output_site("west", (), POOL)
    check_output_site("west", (EAST, WEST), None)
    check_output_site("anywhere", (), None)


def test_what_the_file_or_an_agent_names_is_admitted() -> None:
    """Clusters of the operator's file need not have joined; those that joined need not be in a file."""
    both = PlacementConstraints(clusters=("east", "west"), owners=("owner-east",), chips=("H20", "A100"))
    check_placement_names(both, (), POOL)
    check_placement_names(both, (EAST, WEST), None)


def test_while_no_cluster_is_known_any_name_may_come() -> None:
    """A server without a file, before its first agent, cannot tell a typo."""
    check_placement_names(PlacementConstraints(clusters=("somewhere",)), (), None)


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (
            {"clusters": ["east"], "owners": ["owner-west"]},
            "no cluster of the pool satisfies clusters, owners and",
        ),
        (
            {"clusters": ["east"], "data_owners": ["owner-west"]},
            "no admitted cluster may read the training",
        ),
        ({"regions": ["moon"]}, "no cluster of the pool satisfies clusters, owners and regions together"),
    ],
)
def test_switches_that_no_cluster_satisfies_at_once_are_refused(placement: dict[str, list[str]], words: str) -> None:
    """Each name exists, but the job would wait without end: the submission is refused with the reason."""
    chosen = PlacementConstraints.model_validate(placement)
    with pytest.raises(InputError, match=words):
        check_clusters(chosen, (), POOL)
    check_clusters(chosen, (), None)


@pytest.mark.parametrize(
    ("parallel", "kind", "words"),
    [
        ({"pp": 33}, PlanError, "the model has 32 layers"),
        ({"tp": 5}, PlanError, "does not divide the 32 key and value heads"),
        ({"ep": 2}, PlanError, "ep 2 for a model without experts"),
        ({"pp": 20, "cp": 2}, InputError, r"40 chips \(pp 20 x cp 2\), placement.max_chips allows 39"),
    ],
)
def test_degrees_that_cannot_be_are_refused(parallel: dict[str, int], kind: type[IsthmusError], words: str) -> None:
    """By the model, by the runtime, by the job's own limit; a job that fixes none needs no profile."""
    with pytest.raises(kind, match=words):
        check_degrees(job(parallel=parallel, placement={"max_chips": 39}), published("llama-2-7b"))
    check_degrees(job(parallel={"pp": 2}), published("llama-2-7b"))
    check_degrees(job(), MODEL)
    with pytest.raises(ModelError):
        check_degrees(job(parallel={"pp": 2}), MODEL)
