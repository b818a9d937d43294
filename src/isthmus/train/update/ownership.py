"""`Ownership`: the segments that one rank counts in the gradient norm, updates and saves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from isthmus.train.update.buckets import BUCKET_ELEMENTS, Bucket, Held, Segment, deal_buckets


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows `[at, at + num_rows)` along dimension `dim` of a rank's local tensor."""

    dim: int
    at: int
    num_rows: int


class Ownership:
    """The work of rank `rank` on the parameters that all ranks hold.

    `held` and `clusters` are by rank. With `shard` the owners in a cluster shard the update and the moments:
    each updates the segments that it leads (ZeRO stage 1: S. Rajbhandari et al., "ZeRO: Memory Optimizations
    Toward Training Trillion Parameter Models", SC 2020). Without it each owner updates all that it owns.
    """

    def __init__(
        self,
        held: Sequence[Sequence[Held]],
        rank: int,
        clusters: Sequence[str],
        *,
        shard: bool = False,
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        self.rank, self.shard = rank, shard
        self.buckets = deal_buckets(held, clusters, bucket_elements)
        self.held: dict[str, list[Held]] = {}
        """Rows that this rank holds, by full-model name."""
        for one in held[rank]:
            self.held.setdefault(one.name, []).append(one)
        self.num_rows: dict[str, int] = {}
        """Number of rows of each full-model parameter along its split dimension."""
        for segment in chain(*(one.segments for one in self.buckets)):
            self.num_rows[segment.name] = max(self.num_rows.get(segment.name, 0), segment.stop)
        mine = [one for one in self.buckets if rank in chain(*one.owners)]
        self.counted = tuple(chain(*(one.segments for one in mine if one.leaders[0] == rank)))
        """Segments that this rank counts in the gradient norm; exactly one rank counts each."""
        self.updated = self._rows(mine if not shard else [one for one in mine if rank in one.leaders])
        """Local rows that this rank updates, by full-model name, in the order of `held`."""
        self.saved = self._rows([one for one in mine if _saver(one, shard) == rank])
        """Local rows whose state this rank saves in checkpoints; a subset of `updated`."""

    @classmethod
    def alone(cls, shapes: Mapping[str, Sequence[int]]) -> Ownership:
        """Return the ownership of a rank that shares no parameters; `shapes` are by name."""
        return cls([[Held.whole(name, shape) for name, shape in shapes.items()]], 0, ["alone"])

    @property
    def shared_names(self) -> frozenset[str]:
        """Names of parameters that this rank owns together with other ranks."""
        mine = (one for one in self.buckets if one.is_shared and self.rank in chain(*one.owners))
        return frozenset(segment.name for bucket in mine for segment in bucket.segments)

    def place(self, segment: Segment) -> Rows:
        """Return the local rows of a segment; raises `KeyError` if this rank does not hold it."""
        for one in self.held[segment.name]:
            if one.start <= segment.start and segment.stop <= one.stop:
                at = one.at + segment.start - one.start
                return Rows(dim=one.dim, at=at, num_rows=segment.stop - segment.start)
        raise KeyError(f"rank {self.rank} does not hold {segment}")

    def _rows(self, buckets: Iterable[Bucket]) -> dict[str, tuple[Rows, ...]]:
        """Return the local rows of `buckets` by name, adjacent ones merged."""
        found: dict[str, list[Rows]] = {name: [] for name in self.held}
        for segment in chain(*(one.segments for one in buckets)):
            found[segment.name].append(self.place(segment))
        return {name: tuple(_joined(rows)) for name, rows in found.items() if rows}


def _saver(bucket: Bucket, shard: bool) -> int:
    """Return the rank that saves a bucket, one of those that update it."""
    return bucket.leaders[0] if shard else min(chain(*bucket.owners))


def _joined(some: list[Rows]) -> Iterator[Rows]:
    """Yield `some` in tensor order, adjacent ones merged."""
    last: Rows | None = None
    for one in sorted(some, key=lambda rows: rows.at):
        if last is not None and last.at + last.num_rows == one.at:
            last = Rows(dim=last.dim, at=last.at, num_rows=last.num_rows + one.num_rows)
            continue
        if last is not None:
            yield last
        last = one
    if last is not None:
        yield last
