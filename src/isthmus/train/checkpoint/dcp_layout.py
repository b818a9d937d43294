"""Read and write tensors in torch's distributed checkpoint format (DCP), each rank independently.

    FOLDER/__3_0.distcp     the shards of rank 3 FOLDER/.metadata        the location of every shard; written
    once, from the layouts that the ranks returned

`torch.distributed.checkpoint.load` and `dcp_to_torch_save` read it. DCP's own `save` needs collectives; this
module calls the public methods of its writer and reader on each rank instead.
"""

from __future__ import annotations

import base64
import math
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from isthmus.core.errors import UnavailableError

METADATA_FILE = ".metadata"


@dataclass(frozen=True)
class TensorShard:
    """A rectangular shard of a full-model tensor."""

    # Name of the full tensor.
    name: str
    # Shape of the full tensor.
    shape: tuple[int, ...]
    # Where `tensor` begins in the full tensor, per dimension.
    offsets: tuple[int, ...]
    tensor: torch.Tensor

    @classmethod
    def full(cls, name: str, tensor: torch.Tensor) -> TensorShard:
        """Return the shard that covers all of `tensor`, of any shape."""
        return cls(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Offsets and sizes in DCP's format."""
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=torch.Size(self.tensor.shape))

    @property
    def index(self) -> MetadataIndex:
        """DCP's key of this shard."""
        return MetadataIndex(self.name, self.offsets)


def rank_file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"__{rank}_0.distcp"


def write_shards(folder: Path, rank: int, shards: Iterable[TensorShard]) -> str:
    """Write a rank's shards (in host memory) to its file; return their layout for `write_metadata`.

    The file is flushed to disk. Raises `OSError` if it cannot be written.
    """
    planner = _ShardSavePlanner(shards)
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    plan = writer.prepare_global_plan([SavePlan([])] * rank + [planner.create_local_plan()])[rank]
    try:
        results = writer.write_data(plan, planner).value()
    except RuntimeError as error:  # torch's archive writer wraps the OSError of a full disk
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise
    return base64.b85encode(pickle.dumps((plan, results))).decode()


def write_metadata(folder: Path, layouts: Sequence[str]) -> None:
    """Write `.metadata` from what `write_shards` returned on each rank, in rank order.

    Raises `UnavailableError` if the shards leave a gap in a tensor or overlap.
    """
    decoded = [pickle.loads(base64.b85decode(part)) for part in layouts]  # noqa: S301 - as `.metadata` itself is
    try:
        plans = [plan for plan, _ in decoded]
        _, metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(plans)
    except ValueError as error:
        raise UnavailableError(f"the shards in {folder} do not form a complete model: {error}") from error
    FileSystemWriter(folder).finish(metadata, [results for _, results in decoded])


def read_shards(folder: Path, shards: Sequence[TensorShard]) -> None:
    """Fill the tensors of `shards`, however the model was sharded when it was written.

    Raises `UnavailableError` if a tensor is missing, incomplete or of another shape.
    """
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    planner = _ShardLoadPlanner(shards, metadata, folder)
    reader.set_up_storage_reader(metadata, False)
    with torch.no_grad():
        reader.read_data(planner.create_local_plan(), planner).wait()


class _ShardSavePlanner(DefaultSavePlanner):
    """Plans which shards a rank writes."""

    def __init__(self, shards: Iterable[TensorShard]) -> None:
        super().__init__(flatten_state_dict=False)
        self._shards = {one.index: one for one in shards}

    def create_local_plan(self) -> SavePlan:
        return SavePlan(
            [
                WriteItem(
                    index=index,
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=one.chunk,
                        properties=TensorProperties.create_from_tensor(one.tensor),
                        size=torch.Size(one.shape),
                    ),
                )
                for index, one in self._shards.items()
            ]
        )

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._shards[write_item.index].tensor.contiguous()


class _ShardLoadPlanner(DefaultLoadPlanner):
    """Plans which parts of the stored shards fill the requested ones."""

    def __init__(self, shards: Sequence[TensorShard], metadata: Metadata, folder: Path) -> None:
        super().__init__(flatten_state_dict=False)
        self._shards = {one.index: one for one in shards}
        self._metadata, self._folder = metadata, folder

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for one in self._shards.values() for item in self._read_items(one)])

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        part = self._shards[read_item.dest_index].tensor
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def _read_items(self, shard: TensorShard) -> list[ReadItem]:
        stored = self._metadata.state_dict_metadata.get(shard.name)
        if not isinstance(stored, TensorStorageMetadata):
            raise self._mismatch(f"has no tensor '{shard.name}'")
        if tuple(stored.size) != shard.shape:
            raise self._mismatch(f"holds '{shard.name}' as {list(stored.size)}, the model as {list(shard.shape)}")
        items: list[ReadItem] = create_read_items_for_chunk_list(shard.name, stored, [shard.chunk])
        if sum(math.prod(one.lengths) for one in items) != shard.tensor.numel():
            raise self._mismatch(f"holds only a part of '{shard.name}'")
        return items

    def _mismatch(self, what: str) -> UnavailableError:
        return UnavailableError(
            f"checkpoint {self._folder} {what}",
            hint="it belongs to another model; use another checkpoint folder",
        )
