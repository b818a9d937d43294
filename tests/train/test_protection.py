"""Rules of the requests for a checkpoint that survives a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.core.messages.agent_messages import VerifiedCheckpoint
from isthmus.core.messages.worker_folder import CheckpointRequest, WorkerFolder
from isthmus.train.liveness.checkpoint_requests import RETRY_STEPS, CheckpointRequests


@pytest.fixture
def folder(tmp_path: Path) -> WorkerFolder:
    return WorkerFolder(tmp_path)


def test_a_request_stands_until_a_newer_checkpoint_answers_it(folder: WorkerFolder) -> None:
    """Unasked: no; asked: yes, until one is protected; asked for a newer one: yes again."""
    guard = CheckpointRequests(folder)
    assert not guard.is_requested(5)
    folder.write_checkpoint_request(CheckpointRequest(after=0))
    assert guard.is_requested(5)
    guard.report_verified(6, 100)
    assert folder.read_verified_checkpoint() == VerifiedCheckpoint(step=6, num_bytes=100)
    assert not guard.is_requested(6)
    folder.write_checkpoint_request(CheckpointRequest(after=6))
    assert guard.is_requested(6)


def test_a_checkpoint_that_another_site_asked_for_serves_a_late_request(folder: WorkerFolder) -> None:
    """Two sites ask for one protection: it costs one checkpoint."""
    guard = CheckpointRequests(folder)
    guard.report_verified(6, 100)
    folder.write_checkpoint_request(CheckpointRequest(after=0))
    assert not guard.is_requested(7)


def test_after_a_damaged_checkpoint_training_goes_on_for_a_while(folder: WorkerFolder) -> None:
    """A disk that damages every file does not turn each step into a checkpoint."""
    guard = CheckpointRequests(folder)
    folder.write_checkpoint_request(CheckpointRequest(after=0))
    guard.report_failed(6)
    assert not guard.is_requested(6 + RETRY_STEPS - 1)
    assert guard.is_requested(6 + RETRY_STEPS)


def test_what_cannot_be_told_is_not_protected(folder: WorkerFolder) -> None:
    """Where the folder takes no file the agent gets no report, and a later checkpoint is tried."""
    guard = CheckpointRequests(folder)
    folder.write_checkpoint_request(CheckpointRequest(after=0))
    folder.verified_checkpoint_path.mkdir()
    guard.report_verified(6, 100)
    assert guard.is_requested(6 + RETRY_STEPS)
