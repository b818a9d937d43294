"""Which shards of the model state a rank saves to a checkpoint, and which it loads.

State tensors are named `KIND/PARAMETER`, with KIND `weight`, `exp_avg`, `exp_avg_sq` or `step` (the update
count, a scalar). A rank's tensor may hold several row ranges of a parameter, and rows that other ranks save.

With local steps each replica group has a state of its own: those of group 1 and up are stored as
`group-1/KIND/PARAMETER` and so on. Kinds `outer_weight` and `outer_momentum` are alike in all groups and stored once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch

from isthmus.train.checkpoint.layout.tensor_shard import TensorShard
from isthmus.train.update.buckets import HeldRows
from isthmus.train.update.ownership import LocalRows, Ownership

_STATE_KINDS = ("weight", "exp_avg", "exp_avg_sq")
_OUTER_KINDS = ("outer_weight", "outer_momentum")
_STEP_COUNT = "step"


def shards_to_save(state: Mapping[str, torch.Tensor], ownership: Ownership) -> Iterator[TensorShard]:
    """Yield the shards of `state` that this rank saves.

    `state` holds the rows that this rank updates, concatenated along the split dimension; its `step/*` are scalars.
    """
    for name, saved in ownership.saved_rows.items():
        held_here = ownership.held_rows[name]
        if any(one.start == 0 and rows.at <= one.at < _end_row(rows) for rows in saved for one in held_here):
            key = stored_name(f"{_STEP_COUNT}/{name}", ownership.group)
            yield TensorShard.full(key, state[f"{_STEP_COUNT}/{name}"])
        before = 0
        for updated in ownership.updated_rows[name]:
            for rows, held in itertools.product(saved, held_here):
                start = max(rows.at, updated.at, held.at)
                stop = min(_end_row(rows), _end_row(updated), held.at + held.stop - held.start)
                if start < stop:
                    for kind in _saved_kinds(ownership):
                        whole = state[f"{kind}/{name}"]
                        tensor = whole.narrow(held.dim, before + start - updated.at, stop - start)
                        offset, num_rows = held.start + start - held.at, ownership.num_rows[name]
                        key = stored_name(f"{kind}/{name}", ownership.group)
                        yield _shard(key, tensor, held.dim, offset, num_rows)
            before += updated.num_rows


def allocate_state(
    shapes: Mapping[str, torch.Size], ownership: Ownership, group: int = 0
) -> tuple[dict[str, torch.Tensor], list[TensorShard]]:
    """Return uninitialised tensors for the state of all parameters held here, and the shards that fill them.

    `shapes` are the shapes of this rank's parameters by full-model name, `group` the stored one to read. Tensors are
    fp32 in host memory.
    """
    tensors, pieces = _allocate(shapes, ownership, _STATE_KINDS, group)
    for name in shapes:
        tensors[f"{_STEP_COUNT}/{name}"] = count = torch.zeros(())
        pieces.append(TensorShard.full(stored_name(f"{_STEP_COUNT}/{name}", group), count))
    return tensors, pieces


def allocate_outer_state(
    shapes: Mapping[str, torch.Size], ownership: Ownership
) -> tuple[dict[str, torch.Tensor], list[TensorShard]]:
    """Return what `allocate_state` does, of the outer optimizer, as flat rows [rows, ...]."""
    return _allocate(shapes, ownership, _OUTER_KINDS, 0)


def stored_name(name: str, group: int) -> str:
    """Return the name in a checkpoint of state tensor `name` of a replica group; kinds of all groups belong to 0."""
    return f"group-{group}/{name}" if group else name


def _saved_kinds(ownership: Ownership) -> tuple[str, ...]:
    """Return the kinds that the ranks of a group save: group 0 also saves what is alike in all groups."""
    return (*_STATE_KINDS, *_OUTER_KINDS) if ownership.num_groups > 1 and ownership.group == 0 else _STATE_KINDS


def _allocate(
    shapes: Mapping[str, torch.Size], ownership: Ownership, kinds: Sequence[str], group: int
) -> tuple[dict[str, torch.Tensor], list[TensorShard]]:
    tensors: dict[str, torch.Tensor] = {}
    pieces: list[TensorShard] = []
    for (name, shape), kind in itertools.product(shapes.items(), kinds):
        tensor = tensors[f"{kind}/{name}"] = torch.empty(shape)
        key = stored_name(f"{kind}/{name}", group)
        pieces += [_held_shard(key, tensor, one, ownership) for one in ownership.held_rows[name]]
    return tensors, pieces


def _end_row(rows: LocalRows) -> int:
    return rows.at + rows.num_rows


def _held_shard(key: str, tensor: torch.Tensor, held: HeldRows, ownership: Ownership) -> TensorShard:
    part = tensor.narrow(held.dim, held.at, held.stop - held.start)
    return _shard(key, part, held.dim, held.start, ownership.num_rows[held.name])


def _shard(key: str, tensor: torch.Tensor, dim: int, offset: int, num_rows: int) -> TensorShard:
    shape, offsets = list(tensor.shape), [0] * tensor.dim()
    shape[dim], offsets[dim] = num_rows, offset
    return TensorShard(key, tuple(shape), tuple(offsets), tensor)
