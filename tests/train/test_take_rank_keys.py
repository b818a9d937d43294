"""Rules of a worker's keys: read once, removed, needed beyond this machine; and the bound that its model sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.core.errors import InputError
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerKeys, WorkerSpec
from isthmus.core.model import load_model
from isthmus.train.communication.max_message_bytes import max_message_bytes
from isthmus.train.process.take_rank_keys import take_rank_keys
from tests.train.worker_jobs import keys_of, make_job, make_plan


def spec_of(folder: Path, **changes: object) -> WorkerSpec:
    """Return rank 0 of two stages in clusters a and b."""
    job = make_job(folder)
    return WorkerSpec(run="r", attempt=1, rank=0, job=job, plan=make_plan(job, [2, 4], "ab"), **changes)


def test_keys_are_taken_once(tmp_path: Path) -> None:
    """They name the site of each rank; the file is gone, and a second process finds none."""
    folder, spec = WorkerFolder(tmp_path / "rank-0"), spec_of(tmp_path)
    folder.write_keys(keys_of("a", spec.plan))
    keys = take_rank_keys(folder, spec).links
    assert keys is not None
    assert (keys.site, keys.sites) == ("a", ("a", "b"))
    assert not any(key in repr(keys) for key in keys_of("a", spec.plan).keys.values())
    assert list(folder.path.iterdir()) == []
    assert take_rank_keys(folder, spec).links is None


def test_a_rank_beyond_this_machine_needs_keys(tmp_path: Path) -> None:
    """It ends before it listens, and says what to do; torch's own backends stay inside a cluster."""
    folder, spec = WorkerFolder(tmp_path / "rank-0"), spec_of(tmp_path, host="10.1.2.3")
    with pytest.raises(InputError, match=r"listens at 10\.1\.2\.3 without keys"):
        take_rank_keys(folder, spec)
    assert take_rank_keys(folder, spec.model_copy(update={"backend": "gloo"})).links is None
    folder.write_keys(keys_of("a", spec.plan))
    assert take_rank_keys(folder, spec).links is not None


@pytest.mark.parametrize("content", ["", "{}", '{"keys": {"a": "00"}}', '{"keys": 7}'])
def test_a_malformed_key_file_is_refused_and_removed(tmp_path: Path, content: str) -> None:
    """It is never taken for no keys."""
    folder, spec = WorkerFolder(tmp_path), spec_of(tmp_path)
    folder.keys_path.write_text(content)
    with pytest.raises(InputError, match=r"keys\.json"):
        take_rank_keys(folder, spec)
    assert not folder.keys_path.exists()


def test_a_key_for_every_site_is_needed(tmp_path: Path) -> None:
    """A file without one of the plan's sites names it."""
    folder, spec = WorkerFolder(tmp_path / "rank-0"), spec_of(tmp_path)
    folder.write_keys(WorkerKeys(keys={"a": "0" * 64}))
    with pytest.raises(InputError, match="no key for the links between a and b"):
        take_rank_keys(folder, spec)


def test_the_model_bounds_the_longest_message(tmp_path: Path) -> None:
    """64 MiB for a small one; else a micro-batch of activations or the embedding, in fp32."""
    spec = spec_of(tmp_path)
    model = load_model(spec.job.model)
    assert max_message_bytes(spec.plan, model) == 64 * 2**20
    large = model.model_copy(update={"hidden_size": 8192, "vocab_size": 100_000})
    assert max_message_bytes(spec.plan, large) == 4 * 8192 * 100_000
    long = spec.plan.model_copy(update={"sequence_length": 2**20})
    assert max_message_bytes(long, large) == 4 * 2 * 2**20 * 8192


def test_copies_in_an_object_store_need_a_key(tmp_path: Path) -> None:
    """Without one nothing starts, since copies would be readable; with one it is in no representation."""
    folder, spec = WorkerFolder(tmp_path / "rank-0"), spec_of(tmp_path)
    checkpoints = spec.job.checkpoints.model_copy(update={"copy_store": "s3://bucket/copies"})
    spec = spec.model_copy(update={"job": spec.job.model_copy(update={"checkpoints": checkpoints})})
    with pytest.raises(InputError, match=r"no key for the copies in checkpoints\.copy_store"):
        take_rank_keys(folder, spec)
    folder.write_keys(keys_of("a", spec.plan).model_copy(update={"copies": "0a" * 32}))
    keys = take_rank_keys(folder, spec)
    assert keys.copies == bytes.fromhex("0a" * 32)
    assert "0a0a" not in repr(keys)
