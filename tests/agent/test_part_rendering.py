"""What a job and an owner choose reaches the workers of any site, or the part is refused before cards are held."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from isthmus.agent.adapters.scheduler_adapter import Capabilities, Hold, HoldRequest, RankStart
from isthmus.agent.service.agent_service import AgentService
from isthmus.core.job import Job
from isthmus.core.messages.agent_messages import AgentOrders, PartOrder
from isthmus.core.messages.worker_folder import WorkerFolder
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.pool import Link
from isthmus.render import IMAGE_LABEL
from tests.agent.test_images import LABELS, write_layout
from tests.agent.test_shell import FakeAdapter
from tests.site.samples import EAST, JOB, order

FACTS = {"libraries": {"isthmus": {}}, "command": ["python3", "-m", "isthmus.train.process.supervisor"]}
RESERVED = tuple(
    Link.model_validate({"from": a, "to": b, "bandwidth_gbps": 10, "delay_ms": 20, "class": "reserved"})
    for a, b in (("east", "west"), ("west", "east"))
)


class HoldingAdapter(FakeAdapter):
    """A scheduler that grants each hold at once; it notes what was asked for and started."""

    def __init__(self, containers: str = "none", *, images: bool = False, storage_path: str = "") -> None:
        super().__init__()
        self.capabilities = Capabilities(
            holds="scheduler", blocks=False, containers=containers, images=images, storage_path=storage_path  # type: ignore[arg-type]
        )  # fmt: skip
        self.requests: list[HoldRequest] = []
        self.ranks: list[RankStart] = []

    def hold(self, request: HoldRequest) -> Hold:
        self.requests.append(request)
        return Hold(id=request.id, state="granted", cards=tuple((f"h20/0/{at}",) for at in range(len(request.ranks))))

    def start(self, rank: RankStart) -> None:
        self.ranks.append(rank)
        super().start(rank)


class Site:
    """The agent of `east` on such a scheduler; `policy` is its owner's."""

    def __init__(self, folder: Path, adapter: HoldingAdapter, policy: dict[str, Any] | None = None) -> None:
        self.adapter, self.now_s = adapter, 0.0
        owner = OwnerPolicy.model_validate(policy or {})
        self.service = AgentService(
            cluster=EAST, adapter=adapter, state=folder / "state", clock=lambda: self.now_s, policy=owner
        )

    def advance(self, job: Job, desired: str = "running", **more: object) -> str:
        """Repeat the server's orders up to `desired`; return the state of the part."""
        for wanted in ("queued", "ready", "prepared", "running"):
            part: PartOrder = order(wanted, **more).model_copy(update={"spec": job})
            for _ in range(4):
                self.service.apply_orders(AgentOrders(parts=(part,)))
                self.now_s += 0.5
                self.service.tick()
            if wanted == desired:
                break
        return self.part().state

    def part(self) -> Any:
        (part,) = self.service.observed_parts()
        return part


def job_with(**runtime: object) -> Job:
    return Job.model_validate(JOB.model_dump() | {"runtime": runtime})


def policy_of(folder: Path, *, images: bool = False, **setting: str) -> dict[str, Any]:
    """Return a policy with a template of one setting, if given."""
    workers: dict[str, Any] = {}
    if setting:
        (folder / "templates").mkdir()
        text = yaml.safe_dump({"name": "t", "class": "communication", "settings": [setting]})
        (folder / "templates" / "t.yaml").write_text(text)
        workers["templates"] = str(folder / "templates")
    if images:
        write_layout(folder / "images", LABELS | {IMAGE_LABEL: json.dumps(FACTS)})
        workers["containers"] = {"images": str(folder / "images")}
    return {"workers": workers}


def test_settings_reach_a_rank_at_a_scheduler(tmp_path: Path) -> None:
    """Variables of job and template, and fields of `spec.json`; `render.json` in the worker's folder lists them."""
    policy = policy_of(tmp_path, name="SITE_PART", value="${cluster}", passed_as="environment")
    site = Site(tmp_path, HoldingAdapter(), policy)
    assert site.advance(job_with(communication={"NCCL_DEBUG": "INFO"})) == "running"
    (rank,) = site.adapter.ranks
    assert rank.variables == {"NCCL_DEBUG": "INFO", "SITE_PART": "east"}
    names = {one["name"] for one in json.loads((rank.folder / "render.json").read_text())}
    assert names >= {"NCCL_DEBUG", "SITE_PART", "spec.json#steps"}


@pytest.mark.parametrize(("links", "lanes"), [(RESERVED, 32), ((), 4)])
def test_the_measured_round_trip_sets_the_connections(links: tuple[Link, ...], lanes: int, tmp_path: Path) -> None:
    """On a reserved link of 10 Gbit/s and 40 ms there are as many as fill it twice; else the default of the program."""
    site = Site(tmp_path, HoldingAdapter())
    site.advance(JOB, links=links)
    spec = WorkerFolder(site.adapter.ranks[0].folder).read_spec()
    assert (spec.lanes, spec.congestion_control) == (lanes, "bbr")


@pytest.mark.parametrize(
    ("runtime", "setting", "reason"),
    [
        ({"image": "train:3"}, {}, "starts workers without images; the job asks for image train:3"),
        ({"labels": {"torch": "2.13"}}, {}, "the job asks for label torch: 2.13"),
        ({"library": "hccl"}, {}, "no library hccl"),
        ({}, {"name": "memory.bytes", "value": "1", "passed_as": "container"}, "runs workers as processes"),
    ],
)
def test_what_the_site_cannot_do_is_refused_before_cards_are_held(
    runtime: dict[str, object], setting: dict[str, str], reason: str, tmp_path: Path
) -> None:
    """With its reason, at the first order; the scheduler is asked for nothing."""
    site = Site(tmp_path, HoldingAdapter(), policy_of(tmp_path, **setting))
    assert site.advance(job_with(**runtime), "queued") == "refused"
    assert reason in site.part().detail
    assert site.adapter.requests == []


def test_a_part_that_can_no_more_be_rendered_is_refused_when_it_claims_cards(tmp_path: Path) -> None:
    """The owner adds a template while the part is queued: it is looked at again."""
    site = Site(tmp_path, HoldingAdapter(), {"workers": {"templates": str(tmp_path)}})
    assert site.advance(JOB, "queued") == "queued"
    text = {"name": "t", "class": "mounts", "settings": [{"name": "/d", "value": "/d:ro", "passed_as": "container"}]}
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(text))
    site.now_s += 10.0
    assert site.advance(JOB, "ready") == "refused"


def test_pods_are_held_with_the_rendered_image_and_limits(tmp_path: Path) -> None:
    """The hold and the start name the same image, by digest; the program is the image's."""
    adapter = HoldingAdapter("scheduler", images=True)
    policy = policy_of(tmp_path, images=True, name="memory.bytes", value="4096", passed_as="container")
    site = Site(tmp_path, adapter, policy)
    job = job_with(labels={"torch": "2.13"})
    links_of = {"places": ("east/h20", "east/h20")}
    assert site.advance(job, **links_of) == "running"
    need = adapter.requests[0].containers["h20"]
    assert (need.image.partition("@sha256:")[0], need.memory_bytes) == ("isthmus", 4096)
    assert {rank.image for rank in adapter.ranks} == {need.image}
    assert adapter.ranks[0].command[:3] == ("python3", "-m", "isthmus.train.process.supervisor")


def test_an_image_that_has_gone_asks_for_no_hold(tmp_path: Path) -> None:
    """Rather than pods of another image."""
    adapter = HoldingAdapter("scheduler", images=True)
    site = Site(tmp_path, adapter, policy_of(tmp_path, images=True))
    assert site.advance(job_with(image="isthmus:9"), "ready") == "refused"
    assert adapter.requests == []
    assert "no image 'isthmus:9'" in site.part().detail


@pytest.mark.parametrize(
    ("model", "state"), [("/data/model", "queued"), ("/models/a", "refused"), ("/data/../m", "refused")]
)
def test_a_path_that_no_pod_sees_is_refused(model: str, state: str, tmp_path: Path) -> None:
    """Pods have the files below one folder; a job that names others would fail only once it has its cards."""
    adapter = HoldingAdapter("scheduler", storage_path="/data")
    paths = {"model": model, "output": "/data/out", "data": {"paths": ["/data/text"]}}
    job = Job.model_validate(JOB.model_dump() | paths | {"checkpoints": {"folder": "/data/checkpoints"}})
    site = Site(tmp_path, adapter)
    assert site.advance(job, "queued") == state
    if state == "refused":
        assert "see files below /data alone" in site.part().detail
    assert adapter.requests == []


@pytest.mark.attack
def test_a_users_program_has_its_variables_and_its_worker_has_not(tmp_path: Path) -> None:
    """A worker starts as the agent's account: a library that a job preloads there would have that account's rights."""
    command = {"arguments": ["true"], "ranks": {"east": 1}, "environment": {"LD_PRELOAD": "/mine.so"}}
    job = Job.model_validate({"name": "any", "engine": "command", "command": command, "output": str(tmp_path / "out")})
    site = Site(tmp_path, HoldingAdapter(), {"workers": {"commands": True, "run_as": {"*": "nobody"}}})
    site.advance(job, places=("east/h20",))
    assert [rank.variables for rank in site.adapter.ranks] == [{}]
