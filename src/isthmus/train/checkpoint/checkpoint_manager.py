"""`CheckpointManager`: loads and saves a rank's share of its run's checkpoints on disk."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.core.errors import InputError, PeerError, UnavailableError
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec, write_atomically
from isthmus.core.runs.resume_folder import refuse_finished
from isthmus.core.units import format_bytes
from isthmus.train.checkpoint.async_checkpoint_writer import AsyncCheckpointWriter
from isthmus.train.checkpoint.checkpoint_folder import (
    checkpoint_name,
    load_shards,
    read_layout,
    read_manifests,
    verify_rank_file,
)
from isthmus.train.checkpoint.find_valid_checkpoint import find_valid_checkpoint
from isthmus.train.checkpoint.group_states import StateToLoad
from isthmus.train.checkpoint.layout.tensor_shard import TensorShard
from isthmus.train.checkpoint.memory_slot import Snapshot
from isthmus.train.checkpoint.objects.object_copies import ObjectCopies
from isthmus.train.checkpoint.objects.object_store import ObjectStore
from isthmus.train.checkpoint.sites.fetch_shards import fetch_shards
from isthmus.train.checkpoint.sites.kept_pieces import KeptPieces, remove_kept_pieces
from isthmus.train.checkpoint.sites.peer_channel import PeerChannel
from isthmus.train.checkpoint.sites.site_publisher import SitePublisher
from isthmus.train.checkpoint.sites.site_recovery import FoundCheckpoint, complete_unfinished, find_checkpoint
from isthmus.train.checkpoint.sites.site_stores import SiteStores, find_stores
from isthmus.train.checkpoint.state_shards import shards_to_save
from isthmus.train.checkpoint.write_checkpoint import clear_unfinished
from isthmus.train.communication.communicator import Communicator
from isthmus.train.liveness.worker_events import EventLog
from isthmus.train.update.ownership import Ownership


class CheckpointManager:
    """The checkpoints of the run of `spec`; `ownership` says which rows this rank saves.

    All ranks call `reset` each time the process group is formed.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        folder: WorkerFolder,
        ownership: Ownership,
        communicator: Communicator,
        copy_key: bytes | None = None,
    ) -> None:
        self._spec, self._worker_folder, self._ownership, self._communicator = (
            spec,
            folder,
            ownership,
            communicator,
        )
        self._folder, self._num_ranks = Path(spec.job.checkpoints.folder), len(spec.plan.ranks)
        self._stores = SiteStores((0,) * self._num_ranks, spec.plan.rank_clusters)
        self._channel: PeerChannel | None = None
        self._objects = _open_objects(spec, copy_key)
        self._async_writer = self._make_writer("")

    def reset(self) -> None:
        """Cancel a write interrupted by the loss of a rank, and agree on the id of the next writes.

        Finds which ranks share the folder, and completes or removes what an interrupted write left. Raises
        `InputError` if the ranks share no folder and no transport of Isthmus connects them.
        """
        rank = self._spec.rank
        self._async_writer.close()
        self._stores = find_stores(self._folder, rank, self._spec.plan.rank_clusters, self._communicator)
        needs_channel = not self._stores.is_shared or self._objects is not None
        self._channel = self._open_channel() if needs_channel else None
        if self._channel is not None:
            complete_unfinished(self._folder, rank, self._stores, self._communicator, self._objects)
        elif rank == 0:
            clear_unfinished(self._folder)
        (writing,) = self._communicator.broadcast_from_first([secrets.randbits(62)])
        self._async_writer = self._make_writer(f"{writing:x}")

    def load(
        self, shapes: Mapping[str, torch.Size], extra: Mapping[str, torch.Tensor] | None = None
    ) -> Snapshot | None:
        """Return this rank's state from the newest checkpoint that all ranks find valid; None without one.

        Before the job's own first checkpoint, one of `resume` is loaded; its folder is only read. Raises
        `InputError` if that holds none, or one of another model.

        `shapes` are the shapes of this rank's parameters by full-model name; the snapshot has state tensors
        of these shapes, and those of `extra`, of any shape, that the checkpoint has. Restores torch's random state if
        the number of ranks is unchanged.
        """
        found = self._load(self._folder, shapes, extra or {})
        source = self._spec.job.resume_folder
        if found is not None or source is None:
            return found
        try:
            found = self._load(Path(source), shapes, extra or {})
        except UnavailableError as error:
            raise InputError(f"resume: {error.message}", hint="resume with the model of that run") from error
        if found is None:
            raise InputError(
                f"resume: no checkpoint in {source} is complete and undamaged",
                hint="give the checkpoints.folder of another run, or start without `resume`",
            )
        return found

    def _load(
        self, folder: Path, shapes: Mapping[str, torch.Size], extra: Mapping[str, torch.Tensor]
    ) -> Snapshot | None:
        """Return this rank's state from the newest valid checkpoint of `folder`; `shapes` as in `load`."""
        rank, broadcast, all_gather = (
            self._spec.rank,
            self._communicator.broadcast_from_first,
            self._communicator.all_gather,
        )
        if self._channel is None:
            manifest = find_valid_checkpoint(folder, rank, self._num_ranks, broadcast, all_gather)
            found = None
        else:
            objects = self._objects if folder == self._folder else None
            found = find_checkpoint(folder, rank, self._stores, self._communicator, objects)
            manifest = None if found is None else found.manifest
        if manifest is None:
            return None
        if folder != self._folder:
            refuse_finished(folder, manifest.step, self._spec.job)
        layout = read_layout(folder / checkpoint_name(manifest.step), manifest) if found is None else found.layout
        stored = layout.by_tensor()
        state = StateToLoad(shapes, self._ownership, stored)
        found_extra = {name: one for name, one in extra.items() if name in stored}
        pieces = [*state.shards, *(TensorShard.full(name, one) for name, one in found_extra.items())]
        random_state = self._random_state()
        if manifest.num_ranks == self._num_ranks:
            pieces.append(random_state)
        if found is None or self._channel is None:
            load_shards(folder, manifest.step, pieces)
        else:
            self._fetch(folder, found, pieces)
        torch.set_rng_state(random_state.tensor)
        print(f"rank {rank}: resumed from {folder} after step {manifest.step}", flush=True)
        return Snapshot(manifest.step, manifest.samples, state.tensors() | found_extra)

    def _fetch(self, folder: Path, found: FoundCheckpoint, shards: Sequence[TensorShard]) -> None:
        """Fill `shards` from the checkpoint of all sites in `folder`; what is received is kept in the job's own."""
        if self._channel is None:
            raise RuntimeError("a checkpoint of all sites was found without a channel to them")
        rank, leads = self._spec.rank, self._spec.rank in self._stores.leaders
        if leads:
            remove_kept_pieces(self._folder, found.manifest)
        with KeptPieces(self._folder, found.manifest, found.layout, rank) as kept:
            fetched = fetch_shards(
                folder / checkpoint_name(found.manifest.step), found.layout, found.holders, shards,
                rank=rank, stores=self._stores, channel=self._channel, kept=kept,
                objects=self._objects.reader(found.manifest) if self._objects else None,
            )  # fmt: skip
        self._communicator.barrier()
        if leads:
            remove_kept_pieces(self._folder)
        if fetched.moved or fetched.kept:
            moved, needed = format_bytes(fetched.moved), format_bytes(fetched.needed)
            before = f", {format_bytes(fetched.kept)} by an earlier attempt" if fetched.kept else ""
            source = "the object store and other sites" if self._objects else "other sites"
            print(f"rank {rank}: received {moved} of {needed} from {source}{before}", flush=True)

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint that a rank sees, without verifying it; 0 without one."""
        mine = next(read_manifests(self._folder), None) if self._spec.rank in self._stores.leaders else None
        newest = torch.tensor([0 if mine is None else mine.step], dtype=torch.int64)
        return max(int(one) for one in self._communicator.all_gather(newest))

    def save(self, step: int, samples: int, state: Mapping[str, torch.Tensor]) -> None:
        """Begin to write the checkpoint after `step` steps; wait for it if it is the run's last.

        The tensors of `state`, of the shapes that `shards_to_save` takes, and one without a `/` in its name, which all
        ranks have alike, must not change until `wait_copied`
        returns. Raises `UnavailableError` if the previous checkpoint could not be written.
        """
        pieces = [*shards_to_save(state, self._ownership), self._random_state()]
        if self._spec.rank == 0:
            pieces += [TensorShard.full(name, one) for name, one in state.items() if "/" not in name]
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
            site_publisher=self._make_publisher(write_id),
        )

    def _make_publisher(self, write_id: str) -> SitePublisher | None:
        """Return what completes checkpoints at sites that share no folder; None if all ranks share it."""
        if self._channel is None:
            return None
        return SitePublisher(
            self._folder,
            self._spec.rank,
            self._stores,
            self._channel,
            write_id=write_id,
            copies=self._spec.job.checkpoints.copies,
            keep=self._spec.job.checkpoints.keep,
            objects=self._objects,
            report_wait=self._report_wait,
        )

    def _open_channel(self) -> PeerChannel:
        group = dist.group.WORLD
        if not isinstance(group, IsthmusGroup):
            raise InputError(
                f"the workers do not share checkpoints.folder {self._folder}",
                hint=f"mount one folder at all of them; backend {self._spec.backend} cannot copy parts between them",
            )
        if self._spec.rank == 0:
            sites = ", ".join(dict.fromkeys(map(self._stores.site, self._stores.leaders)))
            copies = self._spec.job.checkpoints.copies
            print(f"sites without a shared checkpoint folder: {sites}; {copies} copies of each part", flush=True)
        return PeerChannel(group.transport)

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


def _open_objects(spec: WorkerSpec, copy_key: bytes | None) -> ObjectCopies | None:
    """Return the job's copies in its object store; None without one."""
    url = spec.job.checkpoints.copy_store
    if url is None:
        return None
    if copy_key is None:
        raise InputError("no key for the copies in checkpoints.copy_store", hint="its agent hands it to the worker")
    return ObjectCopies(ObjectStore.at(url), copy_key, spec.run)


def _find_loss() -> PeerError | None:
    """Return the error of a lost rank if the process group reports one."""
    group = dist.group.WORLD
    return group.transport.loss() if isinstance(group, IsthmusGroup) else None
