"""Which shards of the model state a rank saves to a checkpoint, and which it loads.

State tensors are named `KIND/PARAMETER`, with KIND `weight`, `exp_avg`, `exp_avg_sq` or `step` (the update
count, a scalar). A rank's tensor may hold several row ranges of a parameter, and rows that other ranks save.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch

from isthmus.train.checkpoint.layout.tensor_shard import TensorShard
from isthmus.train.update.buckets import HeldRows
from isthmus.train.update.ownership import LocalRows, Ownership

_STATE_KINDS = ("weight", "exp_avg", "exp_avg_sq")
_STEP_COUNT = "step"


def shards_to_save(state: Mapping[str, torch.Tensor], ownership: Ownership) -> Iterator[TensorShard]:
    """Yield the shards of `state` that this rank saves.

    `state` holds the rows that this rank updates, concatenated along the split dimension; its `step/*` are scalars.
    """
    for name, saved in ownership.saved_rows.items():
        held_here = ownership.held_rows[name]
        if any(one.start == 0 and rows.at <= one.at < _end_row(rows) for rows in saved for one in held_here):
            yield TensorShard.full(f"{_STEP_COUNT}/{name}", state[f"{_STEP_COUNT}/{name}"])
        before = 0
        for updated in ownership.updated_rows[name]:
            for rows, held in itertools.product(saved, held_here):
                start = max(rows.at, updated.at, held.at)
                stop = min(_end_row(rows), _end_row(updated), held.at + held.stop - held.start)
                if start < stop:
                    for kind in _STATE_KINDS:
                        whole = state[f"{kind}/{name}"]
                        tensor = whole.narrow(held.dim, before + start - updated.at, stop - start)
                        offset, num_rows = held.start + start - held.at, ownership.num_rows[name]
                        yield _shard(f"{kind}/{name}", tensor, held.dim, offset, num_rows)
            before += updated.num_rows


def allocate_state(
    shapes: Mapping[str, torch.Size], ownership: Ownership
) -> tuple[dict[str, torch.Tensor], list[TensorShard]]:
    """Return uninitialised tensors for the state of all parameters held here, and the shards that fill them.

    `shapes` are the shapes of this rank's parameters by full-model name. Tensors are fp32 in host memory.
    """
    tensors: dict[str, torch.Tensor] = {}
    pieces: list[TensorShard] = []
    for name, shape in shapes.items():
        tensors[f"{_STEP_COUNT}/{name}"] = torch.zeros(())
        pieces.append(TensorShard.full(f"{_STEP_COUNT}/{name}", tensors[f"{_STEP_COUNT}/{name}"]))
        for kind in _STATE_KINDS:
            tensor = tensors[f"{kind}/{name}"] = torch.empty(shape)
            pieces += [_held_shard(f"{kind}/{name}", tensor, one, ownership) for one in ownership.held_rows[name]]
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
