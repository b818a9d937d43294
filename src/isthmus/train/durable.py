"""`DurableWriter`: writes a rank's part of checkpoints to disk while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from isthmus.core.errors import UnavailableError
from isthmus.train import checkpoint_folder
from isthmus.train.dcp_layout import Piece

_POLL_S = 0.05
"""How often a rank looks whether all others have written their parts."""


class DurableWriter:
    """Rank `rank` of `num_ranks` that write checkpoints into `folder`; for use by one thread.

    `writing` is a name that all ranks of this attempt know and no other attempt has. Rank 0 completes a
    checkpoint and keeps the newest `keep`; the others look whether it has.
    """

    def __init__(self, folder: Path, *, rank: int, num_ranks: int, writing: str, keep: int) -> None:
        self._folder, self._rank, self._num_ranks = folder, rank, num_ranks
        self._writing, self._keep = writing, keep
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="isthmus-durable")
        self._under_way: Future[None] | None = None
        self._given_up = threading.Event()

    def begin(
        self, step: int, samples: int, pieces: Callable[[], Iterable[Piece]], done: Callable[[], None]
    ) -> None:
        """Begin the checkpoint after `step` steps; waits for the one before it.

        `pieces`, called in another thread, gives this rank's tensors in host memory, unchanged until this
        checkpoint is no longer `busy`. `done` is called there once it is complete on disk, of all ranks.
        """
        self.wait()
        self._under_way = self._pool.submit(self._write, step, samples, pieces, done)

    def wait(self) -> None:
        """Return once the checkpoint begun last is complete. Raises `UnavailableError` if it failed."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def check(self) -> None:
        """Raise what the checkpoint begun last has failed with; return at once."""
        if self._under_way is not None and self._under_way.done():
            self.wait()

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._under_way is not None and not self._under_way.done()

    def close(self) -> None:
        """Give up what is not complete, and do not wait for the disk; what is half written is left behind."""
        self._given_up.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._under_way = None

    def _write(
        self, step: int, samples: int, pieces: Callable[[], Iterable[Piece]], done: Callable[[], None]
    ) -> None:
        checkpoint_folder.write_part(
            self._folder, pieces(), step=step, rank=self._rank, writing=self._writing
        )
        while not self._given_up.is_set():
            if self._complete(step, samples):
                done()
                return
            self._given_up.wait(_POLL_S)
        raise UnavailableError(f"the checkpoint after step {step} was given up")

    def _complete(self, step: int, samples: int) -> bool:
        if self._rank:
            return checkpoint_folder.is_published(self._folder, step, self._writing)
        return checkpoint_folder.publish(
            self._folder,
            step=step,
            samples=samples,
            num_ranks=self._num_ranks,
            writing=self._writing,
            keep=self._keep,
        )
