"""Rules of a worker's folder: what one side writes, the other reads whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from isthmus.core.errors import InputError, ProtocolError
from isthmus.core.messages.agent_messages import RankMap, WorkerAddress
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec, WorkerWait, write_atomically


def make_spec(**changes: object) -> WorkerSpec:
    """Return the spec of rank 1 of two stages."""
    job = {
        "name": "j",
        "model": "m",
        "data": {"paths": ["t"]},
        "training": {"steps": 1},
        "checkpoints": {"folder": "c"},
        "output": "o",
    }
    stages = [
        {"cluster": "a", "node_group": "g", "layers": (0, 1)},
        {"cluster": "b", "node_group": "g", "layers": (1, 4)},
    ]
    plan = {
        "id": "p", "stages": stages, "micro_batches": 8, "micro_batch_size": 1, "sequence_length": 2048
    }  # fmt: skip
    fields = {
        "run": "job-1",
        "attempt": 1,
        "rank": 1,
        "job": job,
        "plan": plan,
        "routes": {"a": "127.0.0.1:7001"},
    }
    return WorkerSpec.model_validate(fields | changes)


def test_every_file_reads_as_it_was_written(tmp_path: Path) -> None:
    """Spec, check-in, rank map and exit status survive the way through the folder."""
    folder = WorkerFolder(tmp_path / "rank-1")
    address = WorkerAddress(rank=1, cluster="b", host="127.0.0.1", port=7)
    ranks = RankMap(workers=(address,))
    folder.write_spec(make_spec())
    folder.write_checkin(address)
    folder.write_rank_map(ranks)
    folder.write_exit(143)
    assert folder.read_spec() == make_spec()
    assert folder.read_checkin() == address
    assert folder.read_rank_map() == ranks
    assert folder.read_exit() == 143
    assert {one.name for one in folder.path.iterdir()} == {"spec.json", "checkin.json", "ranks.json", "exit"}


def test_what_is_not_there_yet_is_none(tmp_path: Path) -> None:
    """A reader that comes early gets None; only a missing spec is an error."""
    folder = WorkerFolder(tmp_path)
    assert folder.read_checkin() is None
    assert folder.read_rank_map() is None
    assert folder.read_exit() is None
    with pytest.raises(InputError, match=r"spec\.json is missing"):
        folder.read_spec()


def test_a_wait_keeps_the_time_of_its_beginning(tmp_path: Path) -> None:
    """A repeated reason changes nothing, another one begins a new wait, and no reason ends it; length is bounded."""
    folder = WorkerFolder(tmp_path)
    assert folder.write_wait("waits for rank 3", 10.0)
    assert not folder.write_wait("waits for rank 3", 12.0)
    assert folder.read_wait() == WorkerWait(reason="waits for rank 3", since_s=10.0)
    assert folder.write_wait("x" * 10_000, 14.0)
    assert folder.read_wait() == WorkerWait(reason="x" * 300, since_s=14.0)
    folder.write_wait("", 15.0)
    folder.write_wait("", 15.0)
    assert folder.read_wait() is None
    folder.wait_path.write_text('{"reason": "' + "y" * 301 + '", "since_s": 1}')
    with pytest.raises(InputError, match="reason"):
        folder.read_wait()


def test_another_version_is_a_protocol_error(tmp_path: Path) -> None:
    """A spec of a later format is refused as such, any other mistake is named with its field."""
    folder = WorkerFolder(tmp_path)
    text = make_spec().model_dump_json()
    folder.spec_path.write_text(text.replace('"version":1', '"version":2', 1))
    with pytest.raises(ProtocolError, match="version"):
        folder.read_spec()
    folder.spec_path.write_text(text.replace('"attempt":1', '"attempt":0'))
    with pytest.raises(InputError, match="attempt"):
        folder.read_spec()
    folder.spec_path.write_text("{")
    with pytest.raises(InputError, match="file"):
        folder.read_spec()


def test_a_spec_knows_its_stage() -> None:
    """A rank is a stage's place in the plan; one beyond it is refused."""
    assert make_spec().stage.layers == (1, 4)
    assert make_spec().cluster == "b"
    with pytest.raises(ValidationError, match="rank 2 of a plan of 2 ranks"):
        make_spec(rank=2)


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    """A write that cannot be finished changes nothing and leaves no temporary file."""
    file = tmp_path / "a.json"
    write_atomically(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, "\ud800")
    assert file.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]
