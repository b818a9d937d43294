"""`Ownership`: the segments that one rank counts in the gradient norm, updates and saves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from isthmus.train.update.buckets import (
    BUCKET_ELEMENTS,
    LAYER_BUCKET_ELEMENTS,
    GradientBucket,
    HeldRows,
    ParameterSegment,
    layer_of,
    make_buckets,
)


@dataclass(frozen=True, kw_only=True)
class LocalRows:
    """Rows `[at, at + num_rows)` along dimension `dim` of a rank's local tensor."""

    dim: int
    at: int
    num_rows: int


class Ownership:
    """The work of rank `rank` on the parameters that all ranks hold.

    `held_rows` and `clusters` are by rank. With `shard_updates` the owners in a cluster shard the update and the
    moments: each updates the segments that it leads (ZeRO stage 1: S. Rajbhandari et al., "ZeRO: Memory Optimizations
    Toward Training Trillion Parameter Models", SC 2020). Without it each owner updates all that it owns. With
    `by_layer` each bucket belongs to one layer, for gradients and weights that are sharded too (stages 2 and 3).
    Ranks of different `groups` (by rank; default: all are of one) own nothing together: each group has a state of its
    own.
    """

    def __init__(
        self,
        held: Sequence[Sequence[HeldRows]],
        rank: int,
        clusters: Sequence[str],
        *,
        shard_updates: bool = False,
        by_layer: bool = False,
        bucket_elements: int = BUCKET_ELEMENTS,
        groups: Sequence[int] = (),
    ) -> None:
        self.rank, self.shard_updates = rank, shard_updates
        self.group, self.num_groups = (groups[rank], max(groups) + 1) if groups else (0, 1)
        self.buckets = (
            make_buckets(held, clusters, min(bucket_elements, LAYER_BUCKET_ELEMENTS), layer_of, groups=groups)
            if by_layer
            else make_buckets(held, clusters, bucket_elements, groups=groups)
        )
        self.held_rows: dict[str, list[HeldRows]] = {}
        """Rows that this rank holds, by full-model name."""
        for one in held[rank]:
            self.held_rows.setdefault(one.name, []).append(one)
        self.num_rows: dict[str, int] = {}
        """Number of rows of each full-model parameter along its split dimension."""
        for segment in chain(*(one.segments for one in self.buckets)):
            self.num_rows[segment.name] = max(self.num_rows.get(segment.name, 0), segment.stop)
        mine = [one for one in self.buckets if rank in chain(*one.owners)]
        self.norm_segments = tuple(chain(*(one.segments for one in mine if one.leaders[0] == rank)))
        """Segments that this rank counts in the gradient norm; exactly one rank of a group counts each."""
        self.updated_rows = self._local_rows(
            mine if not shard_updates else [one for one in mine if rank in one.leaders]
        )
        """Local rows that this rank updates, by full-model name, in the order of `held`."""
        self.led_rows = self._local_rows([one for one in mine if rank in one.leaders])
        """Local rows that this rank leads in its cluster, of which it keeps snapshots; a subset of `updated_rows`."""
        self.saved_rows = self._local_rows([one for one in mine if _saving_rank(one, shard_updates) == rank])
        """Local rows whose state this rank saves in checkpoints; a subset of `updated_rows`."""

    @classmethod
    def single_rank(cls, shapes: Mapping[str, Sequence[int]]) -> Ownership:
        """Return the ownership of a rank that shares no parameters; `shapes` are by name."""
        return cls([[HeldRows.full(name, shape) for name, shape in shapes.items()]], 0, ["alone"])

    @property
    def shared_names(self) -> frozenset[str]:
        """Names of parameters that this rank owns together with other ranks."""
        mine = (one for one in self.buckets if one.is_shared and self.rank in chain(*one.owners))
        return frozenset(segment.name for bucket in mine for segment in bucket.segments)

    def locate(self, segment: ParameterSegment) -> LocalRows:
        """Return the local rows of a segment; raises `KeyError` if this rank does not hold it."""
        for one in self.held_rows[segment.name]:
            if one.start <= segment.start and segment.stop <= one.stop:
                at = one.at + segment.start - one.start
                return LocalRows(dim=one.dim, at=at, num_rows=segment.stop - segment.start)
        raise KeyError(f"rank {self.rank} does not hold {segment}")

    def _local_rows(self, buckets: Iterable[GradientBucket]) -> dict[str, tuple[LocalRows, ...]]:
        """Return the local rows of `buckets` by name, adjacent ones merged."""
        found: dict[str, list[LocalRows]] = {name: [] for name in self.held_rows}
        for segment in chain(*(one.segments for one in buckets)):
            found[segment.name].append(self.locate(segment))
        return {name: tuple(_merge_adjacent(rows)) for name, rows in found.items() if rows}


def _saving_rank(bucket: GradientBucket, shard_updates: bool) -> int:
    """Return the rank that saves a bucket, one of those that update it."""
    return bucket.leaders[0] if shard_updates else min(chain(*bucket.owners))


def _merge_adjacent(all_rows: list[LocalRows]) -> Iterator[LocalRows]:
    """Yield `all_rows` in tensor order, adjacent ones merged."""
    last: LocalRows | None = None
    for one in sorted(all_rows, key=lambda rows: rows.at):
        if last is not None and last.at + last.num_rows == one.at:
            last = LocalRows(dim=last.dim, at=last.at, num_rows=last.num_rows + one.num_rows)
            continue
        if last is not None:
            yield last
        last = one
    if last is not None:
        yield last
