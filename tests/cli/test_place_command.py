"""`isthmus place`: nodes and cards by rank, scores by level, alternatives, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.agent.service.part_table import PartTable
from isthmus.site import SitePart, SiteWorker
from tests.cli.test_plan_commands import answer, run

POOL = """\
clusters:
  - name: east
    owner: a
    node_groups:
      - name: h20
        chip: H20
        nodes: 4
        chips_per_node: 8
        topology:
          card_links: [{cards: [0, 2, 4, 6], gbps: 400}]
          tors: [{name: t0, nodes: [0-1]}, {name: t1, nodes: [2-3]}]
"""
PLAN = {
    "id": "p", "micro_batches": 4, "micro_batch_size": 1, "sequence_length": 128,
    "stages": [
        {"cluster": "east", "node_group": "h20", "layers": [0, 4], "tp": 4},
        {"cluster": "east", "node_group": "h20", "layers": [4, 8], "tp": 8},
    ],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A pool with a topology and a plan of twelve chips."""
    (tmp_path / "pool.yaml").write_text(POOL)
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    return tmp_path


def agent_state(folder: Path, cards: list[str]) -> Path:
    """Return the state folder of an agent at which a local job runs on `cards`."""
    state = folder / "agent"
    state.mkdir(exist_ok=True)
    part = SitePart(job="own", attempt=0, state="running")
    part.set_workers({0: SiteWorker(node_group="h20", chips=len(cards), devices=tuple(cards))})
    PartTable(state).save([part], fence=0)
    return state


def test_every_rank_gets_a_node_and_cards_and_levels_say_what_it_costs(folder: Path) -> None:
    """The stage of four gets the linked cards; the part uses one ToR, of which it leaves four cards."""
    found = answer("place", folder / "plan.json", "--pool", folder / "pool.yaml", "--explain")
    (part,) = found["parts"]
    assert (found["plan"], part["placed"], part["domains"]) == ("p", True, {"ToR": ["t0"]})
    places = {one["rank"]: (one["node"], one["cards"]) for one in part["ranks"]}
    assert [places[rank][1] for rank in range(4)] == [[0], [2], [4], [6]]
    assert len({places[rank][0] for rank in range(4, 12)}) == 1
    assert part["levels"] == [
        {"level": "node", "used": 2, "broken": 1, "left_cards": 4},
        {"level": "ToR", "used": 1, "broken": 1, "left_cards": 4},
    ]
    short = answer("place", folder / "plan.json", "--pool", folder / "pool.yaml")["parts"][0]
    assert short.keys() & {"levels", "alternatives"} == set()


def test_cards_in_use_at_a_site_are_those_of_its_agent(folder: Path) -> None:
    """Parts are packed into broken ToRs; the placement in one ToR is among the alternatives."""
    state = agent_state(folder, ["h20/1/0", *(f"h20/2/{card}" for card in range(8))])
    arguments = ("place", folder / "plan.json", "--pool", folder / "pool.yaml", "--state", f"east={state}")
    (part,) = answer(*arguments, "--explain")["parts"]
    assert {one["node"] for one in part["ranks"]} <= {"0", "1", "3"}
    status, text = run(*arguments, "--explain")
    assert (status, "whole ones broken" in text) == (0, True)


def test_a_part_without_a_place_is_named_with_its_reason(folder: Path) -> None:
    """The command fails, and says whether the free cards lie in fragments."""
    state = agent_state(folder, [f"h20/{node}/0" for node in range(4)])
    status, text = run("place", folder / "plan.json", "--pool", folder / "pool.yaml", "--state", f"east={state}")
    assert status == 3
    assert "1 x 8 cards, each inside one node: 0 fit, 28 cards are free, in fragments" in text


@pytest.mark.parametrize(
    ("given", "reason"),
    [("east", "is not CLUSTER=FOLDER"), ("esat=x", "did you mean 'east'?"), ("east=nowhere", "no state folder")],
)
def test_a_state_folder_that_is_none_is_refused(folder: Path, given: str, reason: str) -> None:
    status, text = run("place", folder / "plan.json", "--pool", folder / "pool.yaml", "--state", given)
    assert (status, reason in text) == (2, True)


def test_a_site_gets_its_topology_for_its_own_scheduler(folder: Path) -> None:
    """The only cluster and the only node group with a topology need no names; another kind is refused."""
    found = answer("site", "topology", "--pool", folder / "pool.yaml", "--as", "slurm-tree")
    assert found["text"].splitlines() == [
        "SwitchName=tor-t0 Nodes=0,1", "SwitchName=tor-t1 Nodes=2,3", "SwitchName=h20 Switches=tor-t0,tor-t1",
    ]  # fmt: skip
    status, text = run("site", "topology", "--pool", folder / "pool.yaml", "--as", "slurm")
    assert status == 2
    assert "unknown kind 'slurm'" in text
