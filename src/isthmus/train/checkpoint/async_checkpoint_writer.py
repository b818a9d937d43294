"""`AsyncCheckpointWriter`: writes a rank's checkpoint files to disk in the background, from a copy in host memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import torch

from isthmus.core.errors import PeerError, UnavailableError
from isthmus.train.checkpoint.layout.tensor_shard import TensorShard
from isthmus.train.checkpoint.publish_wait import PublishWait
from isthmus.train.checkpoint.sites.site_publisher import SitePublisher
from isthmus.train.checkpoint.write_checkpoint import (
    find_failure,
    is_published,
    publish,
    read_progress,
    report_failure,
    write_rank_part,
)
from isthmus.train.update.host_copy import ReadyEvent, copy_to_host, record_ready_event

_POLL_S = 0.05
"""Interval at which a rank checks whether all ranks have written their parts."""

REPORT_AFTER_S = 3.0
"""A wait for other ranks is reported, and its progress checked, at this interval."""

_LOSS_POLL_S = 0.5
"""Interval at which a waiting rank checks for a lost rank."""


class AsyncCheckpointWriter:
    """Background writer of rank `rank` of `num_ranks` for checkpoints in `folder`; used by one thread.

    `write_id` is an id that all ranks of this attempt share and other attempts do not. Rank 0 publishes each
    checkpoint and keeps the newest `keep`; other ranks poll for that. `find_loss` returns the error of a lost
    rank. A wait for other ranks ends with an error after `progress_timeout_s` without progress; `report_wait` is
    called with its reason, and with "" at its end. `clusters` are the sites of the ranks.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        num_ranks: int,
        write_id: str,
        keep: int,
        find_loss: Callable[[], PeerError | None] = lambda: None,
        publish: Callable[..., bool] = publish,
        clusters: Sequence[str] = (),
        progress_timeout_s: float = 600.0,
        report_wait: Callable[[str], None] = lambda _reason: None,
        site_publisher: SitePublisher | None = None,
    ) -> None:
        self._site_publisher = site_publisher
        self._folder, self._rank, self._num_ranks = folder, rank, num_ranks
        self._write_id, self._keep, self._find_loss, self._publish = write_id, keep, find_loss, publish
        self._clusters, self._progress_timeout_s, self._report_wait = clusters, progress_timeout_s, report_wait
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="isthmus-durable")
        self._pending_write: Future[None] | None = None
        self._copied: Future[None] = Future()
        self._cancelled, self._publish_lock = threading.Event(), threading.Lock()

    def begin(self, step: int, samples: int, shards: Sequence[TensorShard], on_complete: Callable[[], None]) -> None:
        """Begin to write the checkpoint after `step` steps, once the previous one is complete.

        The tensors of `shards` must not change until `wait_copied` returns. The writer thread calls `on_complete` once
        the checkpoint of all ranks is complete on disk.
        """
        self.wait()
        ready = record_ready_event(one.tensor for one in shards)
        copied: Future[None] = Future()
        self._copied = copied
        self._pending_write = self._pool.submit(self._write, step, samples, shards, ready, copied, on_complete)

    def wait_copied(self) -> None:
        """Wait until the tensors are copied and may change.

        Raises `UnavailableError` if the checkpoint has failed.
        """
        if self._pending_write is not None and self._pending_write.done():
            self.wait()
        elif self._pending_write is not None:
            wait([self._copied, self._pending_write], return_when=FIRST_COMPLETED)

    def wait(self) -> None:
        """Wait until the current checkpoint is complete.

        Raises `UnavailableError` if it failed on any rank, and the `PeerError` of a lost rank.
        """
        while self._pending_write is not None:
            if wait([self._pending_write], _LOSS_POLL_S).done:
                under_way, self._pending_write = self._pending_write, None
                under_way.result()
            elif (lost := self._find_loss()) is not None:
                raise lost

    def close(self) -> None:
        """Cancel the current checkpoint; its `.tmp` folder goes with the last rank that does so, or at the next start.

        Blocks only while rank 0 publishes a checkpoint whose parts are all written.
        """
        self._cancelled.set()
        with self._publish_lock:  # after this, no publish can begin
            pass
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pending_write = None

    def _write(
        self,
        step: int,
        samples: int,
        shards: Sequence[TensorShard],
        ready: ReadyEvent,
        copied: Future[None],
        on_complete: Callable[[], None],
    ) -> None:
        copies = [replace(one, tensor=torch.empty(one.tensor.shape, dtype=one.tensor.dtype)) for one in shards]
        pairs = zip(shards, copies, strict=True)
        copy_to_host(((one.tensor, copy.tensor) for one, copy in pairs), ready)
        copied.set_result(None)
        if self._site_publisher is not None:
            self._complete_at_sites(self._site_publisher, step, samples, copies)
        else:
            self._complete_in_folder(step, samples, copies)
        on_complete()

    def _complete_at_sites(self, publisher: SitePublisher, step: int, samples: int, shards: list[TensorShard]) -> None:
        """Write this rank's part and complete the checkpoint by messages; other ranks learn of a failure here."""
        failure = ""
        try:
            write_rank_part(self._folder, shards, step=step, rank=self._rank, write_id=self._write_id)
        except UnavailableError as error:
            failure = str(error)
        shards.clear()
        publisher.complete(step, samples, failure)

    def _complete_in_folder(self, step: int, samples: int, shards: list[TensorShard]) -> None:
        """Write this rank's part and complete the checkpoint through the folder that all ranks share."""
        try:
            write_rank_part(self._folder, shards, step=step, rank=self._rank, write_id=self._write_id)
            shards.clear()
            self._wait_published(step, samples)
        except UnavailableError as error:
            report_failure(
                self._folder, step=step, rank=self._rank, num_ranks=self._num_ranks, write_id=self._write_id,
                reason=error.message,
            )  # fmt: skip
            raise

    def _wait_published(self, step: int, samples: int) -> None:
        start_s = checked_s = time.monotonic()
        waits = PublishWait(self._folder, step, self._clusters, limit_s=self._progress_timeout_s, now_s=start_s)
        try:
            while not self._cancelled.is_set():
                if self._try_publish(step, samples):
                    return
                if (why := find_failure(self._folder, step, self._write_id)) is not None:
                    raise UnavailableError(f"the checkpoint after step {step} failed: {why}")
                self._cancelled.wait(_POLL_S)
                if (now_s := time.monotonic()) - checked_s >= min(REPORT_AFTER_S, self._progress_timeout_s):
                    checked_s = now_s
                    self._check_progress(step, waits, now_s)
            raise UnavailableError(f"the checkpoint after step {step} was cancelled")
        finally:
            if checked_s != start_s:
                self._report_wait("")

    def _check_progress(self, step: int, waits: PublishWait, now_s: float) -> None:
        """Report what this rank waits for; raises `UnavailableError` if the other ranks make no progress."""
        waits.update(read_progress(self._folder, step=step, num_ranks=self._num_ranks, write_id=self._write_id), now_s)
        self._report_wait(waits.reason)

    def _try_publish(self, step: int, samples: int) -> bool:
        if self._rank:
            return is_published(self._folder, step, self._write_id)
        with self._publish_lock:
            return not self._cancelled.is_set() and self._publish(
                self._folder,
                step=step,
                samples=samples,
                num_ranks=self._num_ranks,
                write_id=self._write_id,
                keep=self._keep,
            )
