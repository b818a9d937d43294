"""`DurableWriter`: writes a rank's checkpoint files to disk in the background, from a copy in host memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import torch

from isthmus.core.errors import PeerError, UnavailableError
from isthmus.train.checkpoint.dcp_layout import Piece
from isthmus.train.checkpoint.write_checkpoint import failure, is_published, publish, tell_failure, write_part
from isthmus.train.update.host_copy import Ready, copy_ready, copy_to_host

_POLL_S = 0.05
"""Interval at which a rank checks whether all ranks have written their parts."""

_LOSS_S = 0.5
"""Interval at which a waiting rank checks for a lost rank."""


class DurableWriter:
    """Background writer of rank `rank` of `num_ranks` for checkpoints in `folder`; used by one thread.

    `writing` is an id that all ranks of this attempt share and other attempts do not. Rank 0 publishes each
    checkpoint and keeps the newest `keep`; other ranks poll for that. `lost` returns the error of a lost
    rank.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        num_ranks: int,
        writing: str,
        keep: int,
        lost: Callable[[], PeerError | None] = lambda: None,
    ) -> None:
        self._folder, self._rank, self._num_ranks = folder, rank, num_ranks
        self._writing, self._keep, self._lost = writing, keep, lost
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="isthmus-durable")
        self._under_way: Future[None] | None = None
        self._copied: Future[None] = Future()
        self._given_up, self._completing = threading.Event(), threading.Lock()

    def begin(self, step: int, samples: int, pieces: Sequence[Piece], done: Callable[[], None]) -> None:
        """Begin to write the checkpoint after `step` steps, once the previous one is complete.

        The tensors of `pieces` must not change until `settle` returns. The writer thread calls `done` once
        the checkpoint of all ranks is complete on disk.
        """
        self.wait()
        ready = copy_ready(one.tensor for one in pieces)
        copied: Future[None] = Future()
        self._copied = copied
        self._under_way = self._pool.submit(self._write, step, samples, pieces, ready, copied, done)

    def settle(self) -> None:
        """Wait until the tensors are copied and may change.

        Raises `UnavailableError` if the checkpoint has failed.
        """
        if self._under_way is not None and self._under_way.done():
            self.wait()
        elif self._under_way is not None:
            wait([self._copied, self._under_way], return_when=FIRST_COMPLETED)

    def wait(self) -> None:
        """Wait until the current checkpoint is complete.

        Raises `UnavailableError` if it failed on any rank, and the `PeerError` of a lost rank.
        """
        while self._under_way is not None:
            if wait([self._under_way], _LOSS_S).done:
                under_way, self._under_way = self._under_way, None
                under_way.result()
            elif (lost := self._lost()) is not None:
                raise lost

    def close(self) -> None:
        """Cancel the current checkpoint and leave its `.tmp` folder behind.

        Blocks only while rank 0 publishes a checkpoint whose parts are all written.
        """
        self._given_up.set()
        with self._completing:  # after this, no publish can begin
            pass
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._under_way = None

    def _write(
        self,
        step: int,
        samples: int,
        pieces: Sequence[Piece],
        ready: Ready,
        copied: Future[None],
        done: Callable[[], None],
    ) -> None:
        copies = [
            replace(one, tensor=torch.empty(one.tensor.shape, dtype=one.tensor.dtype)) for one in pieces
        ]
        pairs = zip(pieces, copies, strict=True)
        copy_to_host(((one.tensor, copy.tensor) for one, copy in pairs), ready)
        copied.set_result(None)
        try:
            write_part(self._folder, copies, step=step, rank=self._rank, writing=self._writing)
            copies.clear()
            self._wait_for_others(step, samples)
        except UnavailableError as error:
            tell_failure(self._folder, step=step, rank=self._rank, writing=self._writing, why=error.message)
            raise
        done()

    def _wait_for_others(self, step: int, samples: int) -> None:
        while not self._given_up.is_set():
            if self._complete(step, samples):
                return
            if (why := failure(self._folder, step, self._writing)) is not None:
                raise UnavailableError(f"the checkpoint after step {step} failed: {why}")
            self._given_up.wait(_POLL_S)
        raise UnavailableError(f"the checkpoint after step {step} was cancelled")

    def _complete(self, step: int, samples: int) -> bool:
        if self._rank:
            return is_published(self._folder, step, self._writing)
        with self._completing:
            return not self._given_up.is_set() and publish(
                self._folder,
                step=step,
                samples=samples,
                num_ranks=self._num_ranks,
                writing=self._writing,
                keep=self._keep,
            )
