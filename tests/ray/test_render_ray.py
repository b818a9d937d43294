"""What `isthmus render` shows of a Ray site is what the adapter submits and orders; no Ray is needed."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus.agent.adapters.ray.ray_adapter import RayAdapter
from isthmus.agent.adapters.ray.render_ray import render_ray
from isthmus.agent.adapters.rendered_hold import CARDS, HOLD_ID, WORKER_FOLDER, PartRequest
from isthmus.agent.adapters.scheduler_adapter import HoldRequest, RankNeed, RankStart
from isthmus.agent.courier.courier import Courier
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerLimits, write_atomically
from tests.ray.stand_in import NODE, StandInRay
from tests.ray.test_ray_parts import site

PROGRAM = (sys.executable, "-m", "any")


@pytest.fixture
def courier(tmp_path: Path) -> Iterator[Courier]:
    made = Courier(tmp_path / "state")
    yield made
    made.close()


def test_what_is_rendered_is_what_is_ordered(courier: Courier, tmp_path: Path) -> None:
    """The order of the hold, that of the rank, and its `start.json`, but for what is known at the start only."""
    east, ray = site(labels={"ray.io/zone": "a"}), StandInRay()
    ray.nodes = [NODE | {"resources_total": {"GPU": 2.0}}]
    adapter = RayAdapter(east, tmp_path / "state", ray.rest(), courier, PROGRAM)
    request = HoldRequest(
        id=uuid.uuid4().hex, job="train", attempt=1, ranks=(RankNeed(node_group="h20", num_cards=2),), lease_s=0.0
    )
    assert adapter.hold(request).state == "waiting"
    (holder,) = (tmp_path / "state" / "ray" / "holders").iterdir()
    orders = holder / "folder"
    hold = json.loads((orders / f"hold-{request.id}.json").read_bytes())
    write_atomically(orders / f"state-{request.id}.json", json.dumps({"state": "granted", "nodes": [NODE["node_id"]]}))
    (cards,) = adapter.hold(request).cards
    folder = tmp_path / "rank"
    folder.mkdir()
    WorkerFolder(folder).limits_path.write_text(WorkerLimits().model_dump_json())
    start = RankStart(folder=folder, cards=cards, hold=request.id, variables={"NCCL_DEBUG": "INFO"})
    adapter.start(start)
    (rank_file,) = orders.glob("rank-*.json")
    rank = json.loads(rank_file.read_bytes())

    shown_start = replace(start, folder=Path(WORKER_FOLDER), cards=(CARDS,), command=(*PROGRAM, WORKER_FOLDER))
    part = PartRequest(request=replace(request, id=HOLD_ID), ranks=(0,), starts=(shown_start,))
    shown = json.loads(render_ray(east, part).text)
    assert shown[f"hold-{HOLD_ID}.json"] == hold
    (shown_rank,) = shown["ranks"]
    assert shown_rank["order"] == rank | {"hold": HOLD_ID, "ticket": "{ticket}"}
    text = (folder / "start.json").read_text().replace(str(folder), WORKER_FOLDER).replace(",".join(cards), CARDS)
    assert shown_rank["start.json"] == json.loads(text)
    assert shown_rank["start.json"]["environment"]["NCCL_DEBUG"] == "INFO"
