"""Rules of a site's checks before a job starts: each finding has a value and advice; nothing is executed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest
from pydantic import ValidationError

from isthmus.agent.files.file_transfer import storage_path
from isthmus.agent.files.site_storage import SiteStorage
from isthmus.agent.preflight import preflight_checks
from isthmus.agent.preflight.preflight_checks import CheckContext, run_check
from isthmus.agent.preflight.preflight_runner import LIMIT_S, PreflightRunner
from isthmus.control.preflight.preflight_record import PreflightRecord
from isthmus.core.messages.preflight import CheckResult, PreflightOrder, SiteCheck
from isthmus.core.rights.storage_rules import Access
from tests.control.samples import plan, submission


class Clock:
    """A clock that sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def check(kind: str, path: Path | str, **fields: object) -> CheckResult:
    """Execute one check at site `north`."""
    context = fields.pop("context", None)
    clock = Clock()
    here = context or CheckContext(site="north", monotonic=clock, sleep=clock.sleep)
    name = str(fields.pop("name", kind))
    return run_check(SiteCheck.model_validate({"kind": kind, "name": name, "path": str(path)} | fields), here)  # type: ignore[arg-type]


@contextmanager
def without_privilege() -> Iterator[int]:
    """Act as a user that may not read files without a permission; yields its id."""
    known = os.geteuid()
    if known == 0:
        os.seteuid(65534)
    try:
        yield os.geteuid()
    finally:
        os.seteuid(known)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("text", ""),
        ("text/a.txt", ""),
        ("text/*.txt", ""),
        ("text/**/*.txt", ""),
        ("missing", "missing: no such file or folder"),
        ("text/*.json", "*.json: no file"),
        ("empty", "empty: 2 empty files"),
        ("hidden", "hidden: no file"),
        ("pipe", "pipe is neither a file nor a folder"),
        ("pipes", "pipes: no file"),
    ],
)
def test_data_must_have_a_visible_file_with_content(tmp_path: Path, path: str, words: str) -> None:
    """Folder, file or glob; a pipe is never opened, which would block."""
    for name, text in {"text/a.txt": "a", "text/b/c.txt": "c", "empty/a": "", "empty/b": "", "hidden/.a": "a"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "pipes").mkdir()
    os.mkfifo(tmp_path / "pipes" / "p")
    os.mkfifo(tmp_path / "pipe")
    found = check("data", tmp_path / path)
    assert (found.status, words in found.detail) == ("failed" if words else "passed", True), found
    if words:
        assert found.hint


def test_a_file_that_the_agents_user_may_not_read_is_found(tmp_path: Path) -> None:
    """The finding names the file, and the advice the user."""
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "b.txt").chmod(0)
    with without_privilege() as user:
        found = check("data", tmp_path / "b.txt")
        unwritable = check("write", "/proc/ckpt")
    assert (found.status, "Permission denied" in found.detail) == ("failed", True)
    assert found.hint == f"let the agent's user (uid {user}) read it"
    assert unwritable.status == "failed"


def test_a_model_needs_its_configuration_and_for_finetuning_its_weights(tmp_path: Path) -> None:
    """Missing, malformed and oversized files are named; every file of the index must be there."""
    assert "no model at" in check("model", tmp_path / "none").detail
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in check("model", tmp_path).detail
    (tmp_path / "config.json").write_text("{}")
    assert check("model", tmp_path).status == "passed"
    assert "no safetensors weights" in check("model", tmp_path, value="weights").detail
    index = tmp_path / "model.safetensors.index.json"
    for content, words in (("[]", "no weight_map"), ('{"weight_map": 7}', "no weight_map"), ("[" * 10**5, "")):
        index.write_text(content)
        found = check("model", tmp_path, value="weights")
        assert found.status == "failed"
        assert words in found.detail
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "../../two.safetensors"}}))
    (tmp_path / "one.safetensors").write_bytes(b"x")
    assert "two.safetensors" in check("model", tmp_path, value="weights").detail
    (tmp_path / "two.safetensors").write_bytes(b"x")
    found = check("model", tmp_path, value="weights")
    assert (found.status, len(found.detail) <= 100) == ("passed", True)


def test_a_huge_configuration_is_not_read(tmp_path: Path) -> None:
    """Memory is bounded: a sparse file of 1 TB is refused by its size."""
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    assert "is larger than" in check("model", tmp_path).detail


@pytest.mark.parametrize(
    ("name", "form", "text", "words"),
    [
        ("a.jsonl", "auto:text", '{"text": "x"}\n\n{"text": "y"}', ""),
        ("a.jsonl", "auto:text", '{"text": "x"}\n{"text": ', "a.jsonl:2: not a line of JSON"),
        ("a.jsonl", "jsonl:body", '{"text": "x"}', "a.jsonl:1: no text under 'body', only ['text']"),
        ("a.jsonl", "jsonl:text", '{"text": 3}', "a.jsonl:1: no text under 'text'"),
        ("a.jsonl", "jsonl:text", "[1]", "a.jsonl:1: no text under 'text'"),
        ("a.jsonl", "jsonl:text", "[" * 60_000, "a.jsonl:1: not a line of JSON"),
        ("a.jsonl", "jsonl:text", '{"text": "' + "x" * 100_000, ""),
        ("a.jsonl", "chat:text", '{"messages": [{"role": "user", "content": "x"}]}', ""),
        ("a.jsonl", "chat:text", '{"text": "x"}', "a.jsonl:1: no list 'messages' of role and content, only ['text']"),
        ("a.jsonl", "chat:text", '{"messages": []}', "a.jsonl:1: no list 'messages'"),
        ("a.txt", "auto:text", "{", ""),
        ("a.txt", "chat:text", "{", "a.txt:1: not a line of JSON"),
    ],
)
def test_the_first_rows_have_the_form_of_the_job(tmp_path: Path, name: str, form: str, text: str, words: str) -> None:
    """JSON Lines with the text field, chats with messages; a row that the sample cuts is not judged."""
    (tmp_path / name).write_text(text)
    found = check("data", tmp_path / name, value=form)
    assert (found.status, found.detail.startswith(str(tmp_path / words)) if words else True) == (
        "failed" if words else "passed", True
    )  # fmt: skip


def test_data_that_cannot_fill_one_batch_are_too_little(tmp_path: Path) -> None:
    """A token stands for a byte at least; a folder of many files is not counted."""
    (tmp_path / "a.txt").write_text("x" * 63)
    assert check("data", tmp_path, num_bytes=64).status == "passed"
    found = check("data", tmp_path, num_bytes=65)
    assert "63 bytes are too little data for the 65 tokens of one batch" in found.detail
    for number in range(preflight_checks.MAX_FILES):
        (tmp_path / f"{number}.txt").write_text("x")
    assert check("data", tmp_path, num_bytes=10_000).status == "passed"


def test_a_tokenizer_is_a_file_or_a_folder_with_one(tmp_path: Path) -> None:
    """The file that would be read is named."""
    assert f"{tmp_path / 'tokenizer.json'}: No such file" in check("file", tmp_path, name="tokenizer").detail
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "it has no 'model'" in check("file", tmp_path).detail
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    assert check("file", tmp_path).status == check("file", tmp_path / "tokenizer.json").status == "passed"


def test_a_folder_is_written_and_leaves_only_what_is_asked_for(tmp_path: Path) -> None:
    """Without a marker nothing is left in it; with one the file is left, and the folder's place is a fact."""
    context = CheckContext(site="north", storage=SiteStorage(root=tmp_path))
    assert check("write", "/pool/ckpt", name="checkpoints", context=context).status == "passed"
    assert list((tmp_path / "pool/ckpt").iterdir()) == []
    check("write", "/pool/ckpt", name="checkpoints", value=".marker", context=context)
    assert [one.name for one in (tmp_path / "pool/ckpt").iterdir()] == [".marker"]
    assert context.facts == {"checkpoints": str(tmp_path / "pool/ckpt")}
    (tmp_path / "file").write_text("")
    found = check("write", tmp_path / "file" / "ckpt")
    assert (found.status, found.detail) == ("failed", f"{tmp_path / 'file' / 'ckpt'}: Not a directory")


@pytest.mark.parametrize("name", ["../escape", "a/b", "/etc/passwd", "..", "\0"])
def test_a_marker_is_a_plain_file_name(tmp_path: Path, name: str) -> None:
    """A server cannot have files written outside the folder of the check."""
    (tmp_path / "in").mkdir()
    for kind in ("write", "marker"):
        found = check(kind, tmp_path / "in", value=name)
        assert (found.status, "is not a file name" in found.detail) == ("failed", True), found
    assert [one.name for one in tmp_path.rglob("*")] == ["in"]


def test_a_marker_follows_no_link(tmp_path: Path) -> None:
    """A link that another user has put at the marker's place is replaced; its target keeps its content."""
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "precious").write_text("weights")
    (tmp_path / "ckpt" / ".m").symlink_to(tmp_path / "precious")
    assert check("write", tmp_path / "ckpt", value=".m").status == "passed"
    assert (tmp_path / "precious").read_text() == "weights"
    assert not (tmp_path / "ckpt" / ".m").is_symlink()


def test_space_counts_the_jobs_own_checkpoints_as_free(tmp_path: Path) -> None:
    """Free and needed bytes are named; a folder that does not exist yet is on the disk of its parent."""
    assert check("space", tmp_path / "new" / "ckpt", num_bytes=1).status == "passed"
    found = check("space", tmp_path, num_bytes=10**18)
    assert (found.status, "checkpoints and result need" in found.detail) == ("failed", True)
    (tmp_path / "step-00000001").mkdir()
    with (tmp_path / "step-00000001" / "0.distcp").open("wb") as file:
        file.truncate(2**42)
    assert "and 4.0 TiB of the job's own checkpoints" in check("space", tmp_path, num_bytes=10**18).detail


def test_sites_that_share_no_folder_pass_and_say_so(tmp_path: Path) -> None:
    """Without the file of the other site each site keeps its own parts."""
    context = CheckContext(site="north", storage=SiteStorage(root=tmp_path))
    wanted = {"name": "checkpoints", "value": ".m", "peer": "south", "peer_path": "/srv/ckpt", "context": context}
    found = check("marker", "/ckpt", **wanted)
    assert (found.status, found.peer) == ("passed", "south")
    assert found.detail == "not shared with south: each site keeps its own"
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / ".m").write_text("")
    assert check("marker", "/ckpt", **wanted).detail == f"{tmp_path / 'ckpt'} is shared with south"


def test_paths_and_results_are_bounded(tmp_path: Path) -> None:
    """A long path makes a short result; an answer beyond its limits is no message."""
    found = check("data", "/" + "x/" * 5000)
    assert found.status == "failed"
    assert len(found.detail) <= 600
    with pytest.raises(ValidationError):
        CheckResult(name="data", status="failed", detail="x" * 601)
    with pytest.raises(ValidationError):
        PreflightOrder(job="j", round=1, checks=(SiteCheck(kind="data", name="d"),) * 257)
    with pytest.raises(ValidationError):
        SiteCheck.model_validate({"kind": "execute", "name": "d"})


def order(*checks: SiteCheck, phase: str = "own", **fields: object) -> PreflightOrder:
    return PreflightOrder.model_validate({"job": "j", "round": 1, "phase": phase, "checks": checks} | fields)


def finish(runner: PreflightRunner) -> None:
    """Wait until the checks that were started have ended."""
    for thread in runner.threads:
        thread.join(10)


def test_markers_stay_for_both_phases_and_go_with_the_order(tmp_path: Path) -> None:
    """Other sites look for them until the preflight has ended everywhere; a dry run also leaves no folder behind."""
    runner = PreflightRunner("north", SiteStorage(root=tmp_path), Clock())
    own = SiteCheck(kind="write", name="checkpoints", path="/new/ckpt", value=".m")
    peers = SiteCheck(kind="marker", name="checkpoints", path="/new/ckpt", value=".m", peer="south")
    runner.update([order(own, temporary=True)])
    finish(runner)
    (answer,) = runner.answers()
    assert (answer.phase, answer.facts) == ("own", {"checkpoints": str(tmp_path / "new/ckpt")})
    runner.update([order(peers, phase="peers", temporary=True)])
    finish(runner)
    (answer,) = runner.answers()
    assert (answer.phase, answer.results[0].status) == ("peers", "passed")
    assert runner.answers() == (answer,), "an answer is repeated until its order is gone"
    runner.update([])
    finish(runner)
    assert (runner.is_open, runner.answers(), list(tmp_path.iterdir())) == (False, (), [])


def test_a_check_that_a_file_system_blocks_is_unknown_after_its_limit(tmp_path: Path) -> None:
    """The other results count; the agent itself never waits.

    1. A check blocks. 2. Before the limit there is no answer. 3. After it, the finished results and `unknown`.
    """
    clock, answered = Clock(), Event()

    class Hanging(SiteStorage):
        def resolve(self, field: str, path: str, access: Access, user: str) -> str:
            assert field == "output" or answered.wait(20)
            return super().resolve(field, path, access, user)

    runner = PreflightRunner("north", Hanging(), clock)
    good = SiteCheck(kind="write", name="output", path=str(tmp_path))
    slow = SiteCheck(kind="marker", name="checkpoints", path=str(tmp_path), value="late", peer="south")
    runner.update([order(good, slow)])
    runner.threads[0].join(0.2)
    assert runner.answers() == ()
    clock.now_s = LIMIT_S
    (answer,) = runner.answers()
    assert [one.status for one in answer.results] == ["passed", "unknown"]
    assert f"has not finished within {LIMIT_S:g} s" in answer.results[1].detail
    answered.set()
    finish(runner)
    runner.close()
    finish(runner)


def test_the_folder_of_a_dry_run_goes_once_the_other_site_has_left_it(tmp_path: Path) -> None:
    """The site that made the folder removes it, also if the file of another site is still inside at first.

    1. A makes the folder, then B writes its file into it. 2. The dry run ends at A. 3. It ends at B.
    """
    folder = tmp_path / "checkpoints"
    asked = {"job": "j", "round": 1, "temporary": True}
    runners = [PreflightRunner(site, SiteStorage(), Clock()) for site in ("a", "b")]
    for number, runner in enumerate(runners):
        write = {"kind": "write", "name": "checkpoints", "path": str(folder), "value": f".marker-{number}"}
        runner.update([PreflightOrder.model_validate(asked | {"checks": [write]})])
        finish(runner)
    assert {file.name for file in folder.iterdir()} == {".marker-0", ".marker-1"}
    first, second = runners
    first.close()
    second.close()
    finish(first)
    finish(second)
    assert not folder.exists()


@pytest.mark.parametrize("shared", [True, False])
def test_two_sites_find_out_whether_they_share_the_folders_of_a_job(tmp_path: Path, shared: bool) -> None:
    """The whole preflight of two sites on real disks: it passes with one disk and with two."""
    wanted = submission(root="/pool/").job
    record = PreflightRecord.begin("j", wanted, plan("north", "south"), 0.0, sites={"north", "south"})
    disks = {site: tmp_path / ("disk" if shared else site) for site in record.sites}
    runners = {site: PreflightRunner(site, SiteStorage(root=disk), Clock()) for site, disk in disks.items()}
    for disk in disks.values():
        for name, text in (("/pool/m/config.json", "{}"), ("/pool/d/text", "x" * 100_000)):
            storage_path(disk, name).parent.mkdir(parents=True, exist_ok=True)
            storage_path(disk, name).write_text(text)
    for _ in range(2):
        for site, runner in runners.items():
            runner.update([record.orders[site]])
            finish(runner)
        for site, runner in runners.items():
            (answer,) = runner.answers()
            record.add_answer(site, answer, wanted, 1.0)
    assert record.state == "passed"
    assert list(record.conflicts()) == []
    details = [one.detail for results in record.results.values() for one in results if one.peer]
    assert all(("is shared with" in one) == shared for one in details), details
