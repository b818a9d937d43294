"""The pool state as JSON by the schema of its classes (`column_codec`), and back: `serialize_state`, `restore_state`.

A snapshot is only a cache, but the base of a compacted log (`log_base`) is read by later versions: a field that is
added to a class of the state needs a default, and a field that is removed needs a migration
(`tests/control/test_compaction.py` reads a base that an earlier version wrote).
"""

from __future__ import annotations

import functools
import zlib
from collections import defaultdict
from dataclasses import dataclass

import pydantic_core
from sortedcontainers import SortedList

from isthmus.control.state.check_indexes import stored_by_user
from isthmus.control.state.coordinator_config import CoordinatorConfig
from isthmus.control.state.indexes import Indexes, QueueKey
from isthmus.control.state.job_records import TERMINAL_STATES, PoolState
from isthmus.control.state.site_records import ClusterRecord
from isthmus.control.store.column_codec import ColumnCodec, column_codec
from isthmus.control.store.log_base import LogBase
from isthmus.control.store.log_chain import LogDamagedError
from isthmus.core.errors import IsthmusError
from isthmus.core.process.gc_pause import collection_paused

MAX_STATE_BYTES = 4 << 30
"""Largest state that a base is read into."""
_DERIVED = frozenset(
    {
        (PoolState, "live_jobs"),
        (ClusterRecord, "parts"),
        (Indexes, "queued_by_user"),
        (Indexes, "queued_by_share"),
        (Indexes, "stored_by_user"),
    }
)
"""Fields that follow from others: the jobs that have not ended, the parts of jobs by cluster, what users have."""


@dataclass(slots=True, kw_only=True)
class _StoredState:
    """The content of a snapshot."""

    # Keys of the unreleased parts at each cluster, in the order of `ClusterRecord.parts`.
    parts_by_cluster: dict[str, list[tuple[str, int]]]
    state: PoolState


def serialize_state(state: PoolState) -> bytes:
    """Return the state as JSON, as `SnapshotFile.save` expects it."""
    parts = {name: list(record.parts) for name, record in state.clusters.items()}
    with collection_paused():
        return pydantic_core.to_json(_codec().encode([_StoredState(parts_by_cluster=parts, state=state)]))


def restore_state(body: bytes) -> PoolState:
    """Return the state of `serialize_state`; raise `ValueError`, `TypeError` or `LookupError` for any other data."""
    (stored,) = _codec().decode(pydantic_core.from_json(body), 1)
    state: PoolState = stored.state
    state.live_jobs = {job_id: job for job_id, job in state.jobs.items() if job.state not in TERMINAL_STATES}
    state.indexes.stored_by_user = stored_by_user(state.jobs)
    by_user, by_share = defaultdict[str, list[QueueKey]](list), defaultdict[str, list[QueueKey]](list)
    for key in state.indexes.order:
        job = state.jobs[state.indexes.ids_by_number[key[2]]]
        by_user[job.user].append(key)
        by_share[job.share_account].append(key)
    state.indexes.queued_by_user = {user: SortedList(keys) for user, keys in by_user.items()}
    state.indexes.queued_by_share = {account: SortedList(keys) for account, keys in by_share.items()}
    for name, keys in stored.parts_by_cluster.items():
        record = state.clusters[name]
        record.parts = {(job, attempt): state.jobs[job].parts[attempt, name] for job, attempt in keys}
    return state


@functools.cache
def _codec() -> ColumnCodec:
    return column_codec(_StoredState, _DERIVED)


def restore_base(base: LogBase, rules: CoordinatorConfig | None = None) -> PoolState:
    """Return the state of `base`, under `rules` from now on (default: those of the state).

    Raises `LogDamagedError` if its body cannot be read.
    """
    try:
        unpacked = zlib.decompressobj()
        text = unpacked.decompress(base.body, MAX_STATE_BYTES)
        if unpacked.unconsumed_tail or not unpacked.eof:
            raise ValueError("it has no end")
        with collection_paused():
            state = restore_state(text)
    except (zlib.error, ValueError, TypeError, LookupError, ArithmeticError, RecursionError, IsthmusError) as error:
        raise LogDamagedError(
            base.end.number,
            f"the base in place of the events up to it cannot be read by this version: {str(error)[:200]}",
        ) from error
    if rules is not None:
        state.config = rules
    return state
