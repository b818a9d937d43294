"""The holder's policy with a Ray in memory: when it asks for cards, when it gives them back, what ends it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from isthmus.agent.adapters.ray.holder import Holder, RayCalls


class FakeGroup:
    """A placement group: `state` is Ray's word for where its scheduling is."""

    def __init__(self) -> None:
        self.state = "SCHEDULING_STARTED"


class FakeRay:
    """`RayCalls` in memory; `removed_in` has the state of each group at its removal."""

    def __init__(self) -> None:
        self.groups: list[FakeGroup] = []
        self.removed_in: list[str] = []
        self.now_s = 100.0

    def make_group(self, _bundles: object, _labels: object) -> FakeGroup:
        self.groups.append(FakeGroup())
        return self.groups[-1]

    def has_cards(self, group: FakeGroup) -> bool:
        return group.state == "FINISHED"

    def table(self, group: FakeGroup) -> dict[str, Any]:
        return {"stats": {"scheduling_state": group.state}, "bundles_to_node_id": {0: "n1"}}

    def remove_group(self, group: FakeGroup) -> None:
        self.removed_in.append(group.state)

    def put(self, data: bytes) -> bytes:
        return data

    def running(self, ranks: list[object]) -> list[object]:
        return ranks

    def holder(self, folder: Path) -> Holder:
        """Return a holder that asks this Ray, and reads its clock."""
        return Holder(folder, b"", cast(RayCalls, self), lambda: self.now_s)


def order(folder: Path, *, released: bool, renewals: int = 1) -> None:
    """Leave an order for the hold `a`, as the agent does it."""
    told = {"bundles": [{"GPU": 1}], "labels": [], "renewals": renewals, "lease_s": 60.0, "released": released}
    (folder / "new").write_text(json.dumps(told))
    (folder / "new").replace(folder / "hold-a.json")


def state(folder: Path) -> str:
    return json.loads((folder / "state-a.json").read_text())["state"]


@pytest.fixture
def ray() -> FakeRay:
    return FakeRay()


def test_a_hold_that_was_released_before_asks_for_nothing(ray: FakeRay, tmp_path: Path) -> None:
    """Its order is answered all the same, so the agent can forget it."""
    holder = ray.holder(tmp_path)
    order(tmp_path, released=True)
    holder.step()
    assert (state(tmp_path), ray.groups, ray.removed_in) == ("ended", [], [])


@pytest.mark.parametrize("settled", ["FINISHED", "NO_RESOURCES", "INFEASIBLE"])
def test_a_group_is_removed_between_no_two_states(settled: str, ray: FakeRay, tmp_path: Path) -> None:
    """Ray 2.60 leaks the cards of a group that is removed after the lease of its bundles and before their commit."""
    holder = ray.holder(tmp_path)
    order(tmp_path, released=False)
    holder.step()
    order(tmp_path, released=True)
    for _ in range(3):
        holder.step()
    assert (state(tmp_path), ray.removed_in) == ("waiting", [])
    ray.groups[0].state = settled
    holder.step()
    assert (state(tmp_path), ray.removed_in) == ("ended", [settled])


def test_a_group_that_never_settles_is_removed_in_time(ray: FakeRay, tmp_path: Path) -> None:
    """No hold lasts beyond a minute after its end."""
    holder = ray.holder(tmp_path)
    order(tmp_path, released=False)
    holder.step()
    ray.now_s += 61.0
    holder.step()
    assert state(tmp_path) == "waiting"
    ray.now_s += 31.0
    holder.step()
    assert (state(tmp_path), len(ray.removed_in)) == ("ended", 1)


def test_a_holder_that_is_given_up_ends_its_holds_before_their_lease(ray: FakeRay, tmp_path: Path) -> None:
    """Once the agent refuses its courier, no release can reach it."""
    holder = ray.holder(tmp_path)
    order(tmp_path, released=False)
    holder.step()
    ray.groups[0].state = "FINISHED"
    holder.step()
    assert state(tmp_path) == "granted"
    holder.give_up()
    holder.step()
    assert (state(tmp_path), ray.removed_in, holder.is_empty) == ("ended", ["FINISHED"], True)
