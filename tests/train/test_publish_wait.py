"""Rules of the wait for other ranks' parts of a checkpoint: it has a reason, a limit and a clear end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isthmus.core.errors import UnavailableError
from isthmus.train.checkpoint.async_checkpoint_writer import AsyncCheckpointWriter
from isthmus.train.checkpoint.layout.tensor_shard import TensorShard
from isthmus.train.checkpoint.publish_wait import PublishProgress, PublishWait

SITES = ("north", "north", "south", "south", "south", "south", "south")


def waiting(*missing: int, num_bytes: int = 0) -> PublishProgress:
    return PublishProgress(missing_ranks=missing, num_bytes=num_bytes)


def wait(limit_s: float = 10.0) -> PublishWait:
    return PublishWait(Path("ckpt"), 40, SITES, limit_s=limit_s, now_s=0.0)


def test_the_reason_names_rank_site_and_checkpoint() -> None:
    """Few ranks are named, many are counted; with all parts there, rank 0 has to publish."""
    one = wait()
    one.update(waiting(3), 1.0)
    assert one.reason == "waits for rank 3 (site south) to write its part of checkpoint 40"
    one.update(waiting(0, 2, 3, 4, 5, 6), 2.0)
    assert one.reason == (
        "waits for ranks 0 (site north), 2 (site south), 3 (site south), 4 (site south) and 2 more "
        "to write their parts of checkpoint 40"
    )
    one.update(waiting(), 3.0)
    assert one.reason == "waits for rank 0 (site north) to publish checkpoint 40"


def test_a_wait_ends_when_nothing_changes_for_its_limit() -> None:
    """A part that grows slowly is waited for as long as it grows; one that stands still for the limit is an error."""
    one = wait(limit_s=10)
    for second in range(0, 100, 9):
        one.update(waiting(3, num_bytes=second), float(second))
    with pytest.raises(UnavailableError, match=r"rank 3 \(site south\).* without progress for 10 s") as error:
        one.update(waiting(3, num_bytes=99), 109.0)
    assert "a checkpoint folder that all sites of the job share" in str(error.value)


def test_a_rank_without_the_shared_folder_ends_with_an_error(tmp_path: Path) -> None:
    """Two ranks that write to different folders: neither waits for ever, each says for which rank it waits.

    The reason is reported while the wait lasts, and withdrawn at its end.
    """
    reports: dict[int, list[str]] = {0: [], 1: []}
    writers = [
        AsyncCheckpointWriter(
            tmp_path / f"site-{rank}",
            rank=rank,
            num_ranks=2,
            write_id="1",
            keep=2,
            clusters=("north", "south"),
            progress_timeout_s=0.02,
            report_wait=reports[rank].append,
        )
        for rank in (0, 1)
    ]
    for rank, writer in enumerate(writers):
        writer.begin(1, 8, [TensorShard.full(f"weight/{rank}", torch.zeros(10))], lambda: None)
    for writer, other in zip(writers, (r"rank 1 \(site south\)", r"rank 0 \(site north\)"), strict=True):
        with pytest.raises(UnavailableError, match=f"incomplete in .*waits for {other} to write its part"):
            writer.wait()
        writer.close()
    for rank, other in ((0, "rank 1 (site south)"), (1, "rank 0 (site north)")):
        assert set(reports[rank][:-1]) == {f"waits for {other} to write its part of checkpoint 1"}
        assert reports[rank][-1] == ""
