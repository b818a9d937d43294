"""The parts of the `ray` adapter without a cluster: its holder job, its reading of answers, its mapping of nodes."""

from __future__ import annotations

import itertools
import json
import zipfile
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import httpx
import pytest

from isthmus.agent.adapters.ray.check_python import check_python
from isthmus.agent.adapters.ray.holder_job import HolderJob
from isthmus.agent.adapters.ray.ray_adapter import RayAdapter
from isthmus.agent.adapters.ray.ray_checks import check_ray
from isthmus.agent.adapters.ray.ray_holds import RayHold
from isthmus.agent.adapters.ray.ray_rest import RayNode
from isthmus.agent.adapters.ray.ray_site import RaySite
from isthmus.agent.adapters.scheduler_adapter import HoldRequest, RankNeed
from isthmus.agent.courier.courier import Courier
from isthmus.core.errors import InputError, UnavailableError
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.owner.site_file import NodeSelector, SiteFile
from isthmus.core.pool import Cluster, NodeGroup
from isthmus.core.text.printable import is_printable
from tests.ray.stand_in import NODE, StandInRay

pytestmark = pytest.mark.integration

GROUP = NodeGroup(name="h20", chip="H20", nodes=1, chips_per_node=2)
CLUSTER = Cluster(name="east", owner="o", node_groups=(GROUP,))
ADDRESS = {"address": "http://ray"}
PARTITION = NodeSelector(partition="p")


@pytest.fixture
def courier(tmp_path: Path) -> Iterator[Courier]:
    made = Courier(tmp_path / "state")
    yield made
    made.close()


def site(**selector: object) -> RaySite:
    groups = {"h20": NodeSelector.model_validate(selector)} if selector else {}
    return RaySite(SiteFile(kind="ray", node_groups=groups, options=dict(ADDRESS)), CLUSTER)


def node(name: str, number: int = 1, **resources: float) -> RayNode:
    return RayNode(id=f"{number:x}" * 56, name=name, labels={}, total=dict(resources), used={})


def listed(**changes: object) -> httpx.Response:
    """Return an answer with one node, changed."""
    one = {**NODE, "resources_total": {"GPU": 2.0}} | changes
    return httpx.Response(200, json={"data": {"result": {"result": [one]}}})


def used(amounts: object) -> httpx.Response:
    """Return an answer with what is used of that node."""
    usage = {"usageByNode": {NODE["node_id"]: amounts}}
    return httpx.Response(200, json={"data": {"clusterStatus": {"loadMetricsReport": usage}}})


def test_a_holder_job_whose_reply_is_lost_is_one(tmp_path: Path, courier: Courier) -> None:
    """Steps: POST arrives, its reply is lost, Ray is down; later the agent submits again: one job."""
    ray = StandInRay()
    job = HolderJob(tmp_path / "ray", ray.rest(), courier)
    ray.lost = "reply"
    with pytest.raises(UnavailableError):
        job.ensure()
    ray.lost = ""
    for again in (job, HolderJob(tmp_path / "ray", ray.rest(), courier)):
        again.ensure()
    assert (ray.num_submitted, list(ray.jobs)) == (1, [job.submission_id])


@pytest.mark.attack
def test_the_ticket_is_in_the_package_alone(tmp_path: Path, courier: Courier) -> None:
    """Not in the id, entrypoint or metadata of the job, nor in a file that the holder's program reads."""
    ray = StandInRay()
    job = HolderJob(tmp_path / "ray", ray.rest(), courier)
    job.ensure()
    (package,) = ray.packages.values()
    with zipfile.ZipFile(BytesIO(package)) as opened:
        token = json.loads(opened.read("holder.ticket"))["token"]
    assert token not in job.submission_id
    assert all(token.encode() not in file.read_bytes() for file in job.folder.iterdir())


def test_a_job_that_has_ended_is_followed_by_the_next_number(tmp_path: Path, courier: Courier) -> None:
    """A number is used once; the ticket of the one before opens nothing any more."""
    ray, now_s = StandInRay(), [0.0]
    job = HolderJob(tmp_path / "ray", ray.rest(), courier, clock=lambda: now_s[0])
    job.ensure()
    first = job.submission_id
    assert not job.has_ended("session_1")
    ray.jobs[first] = "FAILED"
    assert job.has_ended("session_1")
    now_s[0] += 1.0
    job.ensure()
    assert job.submission_id != first
    assert list(ray.jobs) == [job.submission_id]


def test_a_holder_that_ends_at_once_is_submitted_again_after_longer_and_longer_pauses(
    tmp_path: Path, courier: Courier
) -> None:
    """In an hour with a look each second: 1, 2, 4 ... 60 s apart; its reason is known also to the next agent."""
    ray, now_s = StandInRay(), [0.0]
    log = "sh: 1: pyton: not found\nRunning entrypoint for job x\n"
    ray.ending = "FAILED", f"Job entrypoint command failed with exit code 127, last logs:\n{log}"
    submitted_s: list[float] = []
    for second in range(3600):
        now_s[0] = float(second)
        job = HolderJob(tmp_path / "ray", ray.rest(), courier, "pyton", clock=lambda: now_s[0])
        job.has_ended("session_1")
        before = ray.num_submitted
        job.ensure()
        if ray.num_submitted > before:
            submitted_s.append(now_s[0])
    gaps = [b - a for a, b in itertools.pairwise(submitted_s)]
    assert gaps[:7] == [2, 3, 5, 9, 17, 33, 61]  # a pause counts from the look that sees the end
    assert set(gaps[6:]) == {61}
    assert "sh: 1: pyton: not found" in job.trouble
    assert "set options.python" in job.trouble


def test_the_log_of_the_holder_says_why_it_ended(tmp_path: Path, courier: Courier) -> None:
    """Ray calls its job successful, since the courier has carried the end; a normal end is no trouble."""
    ray, now_s = StandInRay(), [0.0]
    job = HolderJob(tmp_path / "ray", ray.rest(), courier, clock=lambda: now_s[0])
    for status, words in (("1", "No module named 'ray'"), ("0", "")):
        job.ensure()
        (job.folder / "log").write_bytes(b"Traceback ...\n\x1b[31mModuleNotFoundError: No module named 'ray'\n\n")
        (job.folder / "exit").write_text(f"{status}\n")
        ray.end_job(job.submission_id, "SUCCEEDED", "Job finished successfully.")
        assert job.has_ended("session_1")
        assert words in job.trouble
        assert bool(job.trouble) == bool(words)
        assert is_printable(job.trouble)
        now_s[0] += 60.0


def test_a_holder_that_answers_has_no_trouble_any_more(tmp_path: Path, courier: Courier) -> None:
    """And its next failure is the first again."""
    ray, now_s = StandInRay(), [0.0]
    job = HolderJob(tmp_path / "ray", ray.rest(), courier, clock=lambda: now_s[0])
    for _ in range(5):
        job.ensure()
        ray.end_job(job.submission_id, "FAILED", "out of memory")
        job.has_ended("session_1")
        now_s[0] += 60.0
    job.ensure()
    assert "5 times in a row" in job.trouble
    write_atomically(job.folder / "state-a.json", '{"state": "granted", "nodes": ["n"]}')
    assert job.read_state("a", 1) == ("granted", ("n",))
    assert job.trouble == ""
    ray.end_job(job.submission_id, "FAILED", "out of memory")
    job.has_ended("session_1")
    now_s[0] += 1.0
    before = ray.num_submitted
    job.ensure()
    assert ray.num_submitted == before + 1


@pytest.mark.parametrize("ends_by", ["courier", "ray", "nothing"])
def test_a_site_that_leaves_has_no_job_at_ray(ends_by: str, tmp_path: Path, courier: Courier) -> None:
    """The holder is asked to end; Ray stops one that does not; one that still runs is an error and stays listed."""
    ray, now_s = StandInRay(), [0.0]
    ray.stops, ray.num_rewritten = ends_by == "ray", 2

    def pause(seconds: float) -> None:
        now_s[0] += seconds
        if ends_by == "courier" and job.submission_id in ray.jobs:
            assert list(tmp_path.glob("ray/holders/1/hold/released"))
            ray.end_job(job.submission_id, "SUCCEEDED", "")

    job = HolderJob(tmp_path / "ray", ray.rest(), courier, clock=lambda: now_s[0], pause=pause)
    job.end()
    assert ray.num_submitted == 0
    job.ensure()
    if ends_by == "nothing":
        with pytest.raises(UnavailableError, match="still runs"):
            job.end()
        return
    job.end()
    assert ray.jobs == {}
    assert now_s[0] < 30


def test_a_job_is_gone_after_two_looks_at_one_session(tmp_path: Path, courier: Courier) -> None:
    """One look without it, or one in each of two sessions, proves nothing."""
    ray = StandInRay()
    job = HolderJob(tmp_path / "ray", ray.rest(), courier)
    job.ensure()
    ray.jobs.clear()
    assert [job.has_ended(session) for session in ("session_1", "session_2", "session_3", "session_3")] == [
        False, False, False, True
    ]  # fmt: skip


def test_a_hold_that_is_asked_for_after_the_loss_of_the_head_is_not_used_up(tmp_path: Path, courier: Courier) -> None:
    """It waits for the next holder job; a hold of the one before has ended."""
    ray = StandInRay()

    def ask(adapter: RayAdapter, hold_id: str) -> str:
        need = RankNeed(node_group="h20", num_cards=1)
        return adapter.hold(HoldRequest(id=hold_id, job="j", attempt=1, ranks=(need,), lease_s=60.0)).state

    before = RayAdapter(site(), tmp_path / "state", ray.rest(), courier)
    assert ask(before, "a" * 32) == "waiting"
    ray.jobs.clear()
    ray.session = "session_2"
    after = RayAdapter(site(), tmp_path / "state", ray.rest(), courier)
    assert [ask(after, "b" * 32) for _ in range(4)] == ["waiting"] * 4
    assert ask(after, "a" * 32) == "ended"


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/api/v0/nodes", httpx.Response(200, json={"data": None})),
        ("/api/v0/nodes", httpx.Response(200, json={"data": {"result": {"result": [7]}}})),
        ("/api/v0/nodes", httpx.Response(200, json={"data": {"result": {"result": [{"state": "ALIVE"}]}}})),
        ("/api/v0/nodes", httpx.Response(200, text="<html>")),
        ("/api/v0/nodes", httpx.Response(503, text="starting")),
        ("/api/cluster_status", httpx.Response(200, json={"data": {"clusterStatus": None}})),
        ("/api/v0/nodes", listed(labels=["a"])),
        ("/api/v0/nodes", listed(labels={"a": 1})),
        ("/api/v0/nodes", listed(resources_total=[["GPU", 1]])),
        ("/api/v0/nodes", listed(resources_total={"GPU": "2"})),
        ("/api/v0/nodes", listed(resources_total={"GPU": True})),
        ("/api/v0/nodes", listed(resources_total={"GPU": -1})),
        ("/api/v0/nodes", listed(resources_total={"GPU": 10**400})),
        ("/api/v0/nodes", listed(node_id=7)),
        ("/api/v0/nodes", httpx.Response(200, text=listed().text.replace("2.0", "NaN"))),
        ("/api/v0/nodes", httpx.Response(200, text="[" * 200_000)),
        ("/api/cluster_status", used({"GPU": 1.0})),
        ("/api/cluster_status", used({"GPU": []})),
        ("/api/cluster_status", used({"GPU": [None, 2.0]})),
        ("/api/cluster_status", used(["GPU"])),
    ],
)
def test_an_answer_that_cannot_be_read_is_no_empty_cluster(path: str, answer: httpx.Response) -> None:
    """The error names the request; nothing is taken for 'no nodes'."""
    ray = StandInRay()
    ray.replaced[path] = answer
    with pytest.raises(UnavailableError, match=path):
        ray.rest().nodes()


@pytest.mark.attack
@pytest.mark.parametrize("status", [200, 503])
def test_what_ray_answers_cannot_write_to_a_terminal(status: int) -> None:
    """Escapes and reordering characters of an answer are shown, not sent."""
    ray = StandInRay()
    ray.replaced["/api/version"] = httpx.Response(status, text="\x1b]0;owned\x07\u202e\x9b2J")
    with pytest.raises(UnavailableError) as caught:
        ray.rest().version()
    assert is_printable(str(caught.value))
    assert "\\x1b" in str(caught.value)


@pytest.mark.attack
def test_an_answer_without_end_is_cut() -> None:
    """No more is read than the limit and a chunk, of errors too; a packed answer is refused unread."""
    ray, num_sent = StandInRay(), 0

    def endless() -> Iterator[bytes]:
        nonlocal num_sent
        while True:
            num_sent += 1
            yield b"x" * 100

    for status in (200, 500):
        num_sent = 0
        ray.replaced["/api/version"] = httpx.Response(status, content=endless())
        with pytest.raises(UnavailableError, match="more than 1000 bytes"):
            ray.rest(max_answer_bytes=1000).version()
        assert num_sent <= 12
    bomb = zlib.compress(b"[" + b"1," * 5_000_000 + b"1]")
    packed = httpx.Response(200, stream=httpx.ByteStream(bomb), headers={"Content-Encoding": "deflate"})
    ray.replaced["/api/version"] = packed
    with pytest.raises(UnavailableError, match="encoded"):
        ray.rest().version()


@pytest.mark.attack
@pytest.mark.parametrize(
    "text",
    ['{"state": "granted", "nodes": ["a"]}', '{"state": "granted", "nodes": 7}', '{"state": "won"}', "[]", "{", "7"],
)
def test_an_answer_of_the_holder_that_cannot_be_read_grants_nothing(
    text: str, tmp_path: Path, courier: Courier
) -> None:
    """Two ranks need two nodes, of a known state."""
    job = HolderJob(tmp_path / "ray", StandInRay().rest(), courier)
    job.ensure()
    write_atomically(job.folder / "state-x.json", text)
    with pytest.raises(UnavailableError):
        job.read_state("x", 2)
    assert job.read_state("y", 2) == ("waiting", ())


def test_nodes_of_one_name_stay_apart() -> None:
    """Ray names nodes by their address; two on one machine get the start of their ids as well."""
    names = site().names([node("10.0.0.1", 1), node("10.0.0.1", 2), node("a b/c", 3)])
    assert len(set(names.values())) == 3
    assert all("/" not in name and " " not in name for name in names.values())


def test_what_others_use_is_a_job_per_node() -> None:
    """Used beyond our own cards; cards that are ours are never theirs."""
    one = RayNode(id="a" * 56, name="one", labels={}, total={"GPU": 2.0}, used={"GPU": 2.0})
    ours = {"one": {"h20/one/0"}}
    (job,) = site().foreign_jobs([one], ours)
    assert (job.name, job.cards, job.running) == ("ray-one", ("h20/one/1",), True)
    assert site().foreign_jobs([one], {"one": {"h20/one/0", "h20/one/1"}}) == ()


def test_a_hold_is_over_only_after_its_lease_and_a_margin(tmp_path: Path) -> None:
    """Right after its release a worker may not have seen it; a release of another start of the machine counts anew."""
    hold = RayHold(tmp_path, "a")
    write_atomically(hold.path / "lease", "3 20.0\n")
    hold.release()
    assert not hold.is_over()
    released = json.loads((hold.path / "released").read_text())
    write_atomically(hold.path / "released", json.dumps(released | {"at_s": released["at_s"] - 100}))
    assert hold.is_over()
    write_atomically(hold.path / "released", json.dumps({"boot": "another", "at_s": 0.0}))
    assert not hold.is_over()


@pytest.mark.parametrize(
    ("selector", "words"),
    [
        ({"resource": "GPUU"}, ("unknown resource 'GPUU'", "GPU")),
        ({"labels": {"ray.io/zome": "a"}}, ("no node has the label 'ray.io/zome'", "ray.io/zone")),
        ({"labels": {"ray.io/zone": "b"}}, ("label 'ray.io/zone' is a, asked: 'b'",)),
    ],
)
def test_a_check_names_the_nearest_word(selector: dict[str, object], words: tuple[str, ...]) -> None:
    """Of resources and labels that Ray's nodes have."""
    wrong = [one for one in check_ray(site(**selector), StandInRay().rest()) if not one.ok]
    assert wrong
    assert all(any(word in f"{one.detail} {one.hint}" for one in wrong) for word in words)


@pytest.mark.parametrize(
    ("ending", "is_ok", "words"),
    [
        (("SUCCEEDED", "Job finished successfully."), True, "has Ray"),
        (("FAILED", "exit code 127:\nsh: 1: pyton: not found"), False, "set options.python"),
        (("FAILED", "exit code 1:\nModuleNotFoundError: No module named 'ray'"), False, "set options.python"),
        (("FAILED", "exit code 1:\nneeds Python 3.11 or later, is 3.8.10"), False, "set options.python"),
        (None, False, "PENDING after 60 s"),
    ],
)
def test_a_check_tries_the_python_of_ray_and_leaves_no_job(
    ending: tuple[str, str] | None, is_ok: bool, words: str
) -> None:
    """A job that ends at once says whether the holder can run; a limit ends one that does not start."""
    ray, now_s = StandInRay(), [0.0]
    ray.ending, ray.num_rewritten = ending, 1

    def pause(seconds: float) -> None:
        now_s[0] += seconds

    (found,) = check_python(ray.rest(), "pyton", clock=lambda: now_s[0], pause=pause)
    assert (found.ok, words in f"{found.detail} {found.hint}") == (is_ok, True), found
    assert (ray.num_submitted, ray.jobs) == (1, {})


def test_a_check_without_ray_is_a_finding() -> None:
    """A dashboard that is lost on the way is no crash."""
    ray = StandInRay()
    ray.lost = "request"
    (found,) = check_python(ray.rest(), "python", clock=lambda: 0.0)
    assert not found.ok


def test_a_check_finds_what_no_group_has() -> None:
    """A resource of no node group, an old Ray, and a dashboard that is down."""
    ray = StandInRay()
    ray.nodes = [*ray.nodes, {**ray.nodes[0], "node_id": "cd" * 28, "resources_total": {"CPU": 1.0, "TPU": 4.0}}]
    assert any("(TPU)" in one.detail for one in check_ray(site(), ray.rest()) if not one.ok)
    ray.nodes = [{**NODE, "resources_total": {"GPU": 2.0, "NPU": 4.0, "fast_disk": 1.0}}]
    (found,) = (one for one in check_ray(site(), ray.rest()) if "no node group" in one.detail)
    assert found.detail.endswith("(NPU)")
    ray.replaced["/api/version"] = httpx.Response(200, json={"ray_version": "2.9.3", "session_name": "s"})
    assert next(one.check for one in check_ray(site(), ray.rest()) if not one.ok) == "version"
    ray.lost, ray.replaced = "request", {}
    (found,) = check_ray(site(), ray.rest())
    assert (found.ok, found.file_path) == (False, ("options", "address"))


def test_a_missing_right_is_named_by_verb_and_object() -> None:
    """Ray has one token for all: without it nothing may be read, and with another no job may be made."""
    ray = StandInRay()
    ray.replaced["/api/v0/nodes"] = httpx.Response(401, text="no token")
    (found,) = check_ray(site(), ray.rest())
    assert (found.ok, found.detail) == (False, "missing right: read nodes at Ray (401)")
    assert "options.token_file" in found.hint
    ray.replaced = {"/api/jobs/": httpx.Response(403)}
    (tried,) = check_python(ray.rest(), "python", clock=lambda: 0.0)
    assert "missing right: create jobs at Ray (403)" in tried.detail


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (SiteFile(kind="ray"), "names no dashboard"),
        (SiteFile(kind="ray", options={**ADDRESS, "courier_port": "seven"}), "options.courier_port: 'seven'"),
        (SiteFile(kind="ray", options={"address": "head:8265"}), "'head:8265' is no URL"),
        (SiteFile(kind="ray", options={**ADDRESS, "adress": "x"}), "unknown option of a Ray site: 'adress'"),
        (SiteFile(kind="ray", options={**ADDRESS, "images": "images"}), "options.images: 'images' is no absolute path"),
        (SiteFile(kind="ray", options={**ADDRESS, "image_store": "/s"}), "image_store without images"),
        (
            SiteFile(kind="ray", node_groups={"h20": NodeSelector(partition="p")}, options=dict(ADDRESS)),
            "no partitions",
        ),
    ],
)
def test_a_site_file_that_ray_cannot_have_is_refused(file: SiteFile, words: str) -> None:
    """Options and selectors of other kinds, with what to write instead."""
    with pytest.raises(InputError, match=words) as caught:
        RaySite(file, CLUSTER)
    assert caught.value.hint
