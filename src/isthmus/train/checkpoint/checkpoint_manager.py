"""`CheckpointManager`: loads and saves a rank's share of its run's checkpoints on disk."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.core.errors import InputError, PeerError, UnavailableError
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec, write_atomically
from isthmus.core.runs.resume_folder import refuse_finished
from isthmus.train.checkpoint.async_checkpoint_writer import AsyncCheckpointWriter
from isthmus.train.checkpoint.checkpoint_folder import Manifest, load_shards, read_manifests, verify_rank_file
from isthmus.train.checkpoint.find_valid_checkpoint import find_valid_checkpoint
from isthmus.train.checkpoint.layout.tensor_shard import TensorShard
from isthmus.train.checkpoint.memory_slot import Snapshot
from isthmus.train.checkpoint.state_shards import allocate_state, shards_to_save
from isthmus.train.checkpoint.write_checkpoint import clear_unfinished
from isthmus.train.communication.communicator import Communicator
from isthmus.train.liveness.worker_events import EventLog
from isthmus.train.update.ownership import Ownership


class CheckpointManager:
    """The checkpoints of the run of `spec`; `ownership` says which rows this rank saves.

    All ranks call `reset` each time the process group is formed.
    """

    def __init__(
        self, spec: WorkerSpec, folder: WorkerFolder, ownership: Ownership, communicator: Communicator
    ) -> None:
        self._spec, self._worker_folder, self._ownership, self._communicator = (
            spec,
            folder,
            ownership,
            communicator,
        )
        self._folder, self._num_ranks = Path(spec.job.checkpoints.folder), len(spec.plan.ranks)
        self._async_writer = self._make_writer("")

    def reset(self) -> None:
        """Cancel a write interrupted by the loss of a rank, and agree on the id of the next writes."""
        self._async_writer.close()
        if self._spec.rank == 0:
            clear_unfinished(self._folder)
        (writing,) = self._communicator.broadcast_from_first([secrets.randbits(62)])
        self._async_writer = self._make_writer(f"{writing:x}")

    def load(self, shapes: Mapping[str, torch.Size]) -> Snapshot | None:
        """Return this rank's state from the newest checkpoint that all ranks find valid; None without one.

        Before the job's own first checkpoint, one of `resume` is loaded; its folder is only read. Raises
        `InputError` if that holds none, or one of another model.

        `shapes` are the shapes of this rank's parameters by full-model name; the snapshot has state tensors
        of these shapes. Restores torch's random state if the number of ranks is unchanged.
        """
        manifest = self._find_valid(self._folder)
        if manifest is not None:
            return self._load(self._folder, manifest, shapes)
        source = self._spec.job.resume_folder
        if source is None:
            return None
        manifest = self._find_valid(Path(source))
        if manifest is None:
            raise InputError(
                f"resume: no checkpoint in {source} is complete and undamaged",
                hint="give the checkpoints.folder of another run, or start without `resume`",
            )
        refuse_finished(Path(source), manifest.step, self._spec.job)
        try:
            return self._load(Path(source), manifest, shapes)
        except UnavailableError as error:
            raise InputError(f"resume: {error.message}", hint="resume with the model of that run") from error

    def _find_valid(self, folder: Path) -> Manifest | None:
        """Return the newest checkpoint of `folder` that all ranks find valid; all ranks call this."""
        broadcast, all_gather = self._communicator.broadcast_from_first, self._communicator.all_gather
        return find_valid_checkpoint(folder, self._spec.rank, self._num_ranks, broadcast, all_gather)

    def _load(self, folder: Path, manifest: Manifest, shapes: Mapping[str, torch.Size]) -> Snapshot:
        """Return this rank's state from a checkpoint of `folder`; `shapes` as in `load`."""
        tensors, pieces = allocate_state(shapes, self._ownership)
        random_state = self._random_state()
        if manifest.num_ranks == self._num_ranks:
            pieces.append(random_state)
        load_shards(folder, manifest.step, pieces)
        torch.set_rng_state(random_state.tensor)
        print(f"rank {self._spec.rank}: resumed from {folder} after step {manifest.step}", flush=True)
        return Snapshot(manifest.step, manifest.samples, tensors)

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint that rank 0 sees, without verifying it; 0 without one."""
        mine = next(read_manifests(self._folder), None) if self._spec.rank == 0 else None
        return self._communicator.broadcast_from_first([0 if mine is None else mine.step])[0]

    def save(self, step: int, samples: int, state: Mapping[str, torch.Tensor]) -> None:
        """Begin to write the checkpoint after `step` steps; wait for it if it is the run's last.

        The tensors of `state`, of the shapes that `shards_to_save` takes, must not change until `wait_copied`
        returns. Raises `UnavailableError` if the previous checkpoint could not be written.
        """
        pieces = [*shards_to_save(state, self._ownership), self._random_state()]
        self._async_writer.begin(step, samples, pieces, partial(self._report_saved, step, time.monotonic()))
        if step == self._spec.job.training.steps:
            self._async_writer.wait()

    def wait_copied(self) -> None:
        """Wait until the tensors being saved may change."""
        self._async_writer.wait_copied()

    def wait(self) -> None:
        """Wait until the current checkpoint is complete on disk; raises `UnavailableError` if it failed."""
        self._async_writer.wait()

    def verify(self, step: int) -> int:
        """Verify this rank's file of the checkpoint after `step` steps from disk; return its size in bytes.

        Raises `UnavailableError` if it is missing or damaged.
        """
        return verify_rank_file(self._folder, step, self._spec.rank)

    def _make_writer(self, write_id: str) -> AsyncCheckpointWriter:
        return AsyncCheckpointWriter(
            self._folder,
            rank=self._spec.rank,
            num_ranks=self._num_ranks,
            write_id=write_id,
            keep=self._spec.job.checkpoints.keep,
            find_loss=_find_loss,
            clusters=self._spec.plan.rank_clusters,
            progress_timeout_s=self._spec.checkpoint_timeout_s,
            report_wait=self._report_wait,
        )

    def _random_state(self) -> TensorShard:
        return TensorShard.full(f"rng/rank-{self._spec.rank:05d}", torch.get_rng_state())

    def _report_wait(self, reason: str) -> None:
        with suppress(OSError):  # the wait itself has a limit
            if self._worker_folder.write_wait(reason, time.time()):
                print(f"rank {self._spec.rank} {reason}", flush=True)

    def _report_saved(self, step: int, begun_s: float) -> None:
        if self._spec.rank == 0:
            seconds = time.monotonic() - begun_s
            detail = f"checkpoint after step {step} is complete, {seconds:.2f} s after its start"
            EventLog(self._worker_folder, 0).record("saved", detail, seconds=seconds, step=step)
        with suppress(OSError):  # then the agent assumes an older checkpoint, which is safe
            write_atomically(self._worker_folder.saved_path, f"{step}\n")


def _find_loss() -> PeerError | None:
    """Return the error of a lost rank if the process group reports one."""
    group = dist.group.WORLD
    return group.transport.loss() if isinstance(group, IsthmusGroup) else None
