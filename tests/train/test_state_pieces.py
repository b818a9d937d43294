"""Rules of resharding: what ranks saved under one cut of the model is loaded under any other."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.train.checkpoint.layout.checkpoint_layout import merge_layouts
from isthmus.train.checkpoint.layout.shard_files import read_shards, write_shards
from isthmus.train.checkpoint.state_shards import allocate_state, shards_to_save
from isthmus.train.update.buckets import HeldRows
from isthmus.train.update.ownership import LocalRows, Ownership

SHAPES = {"wide": (7, 3), "long": (40,), "deep": (5, 2, 4)}
KINDS = ("weight", "exp_avg", "exp_avg_sq")
Tensors = dict[str, torch.Tensor]


def whole_state() -> Tensors:
    """The state of the whole model; each number occurs once."""
    state: Tensors = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        for place, kind in enumerate(KINDS):
            elements = torch.arange(torch.Size(shape).numel(), dtype=torch.float32)
            state[f"{kind}/{name}"] = (elements + 1000 * number + 100 * place).view(shape)
        state[f"step/{name}"] = torch.tensor(float(number + 1))
    return state


Cut = list[list[HeldRows]]
"""What each rank holds."""


@st.composite
def cuts(draw: st.DrawFn, dims: Mapping[str, int] | None = None) -> Cut:
    """Up to four ranks, each parameter in up to three ranges of rows of one dimension (`dims`), copied by some."""
    ranks: Cut = [[] for _ in range(draw(st.integers(1, 4)))]
    for name, shape in SHAPES.items():
        dim = dims[name] if dims else draw(st.integers(0, len(shape) - 1))
        row = torch.Size(shape).numel() // shape[dim]
        bounds = sorted({0, shape[dim], *draw(st.lists(st.integers(1, shape[dim]), max_size=2))})
        ends = [0] * len(ranks)
        for start, stop in itertools.pairwise(bounds):
            for rank in draw(st.sets(st.integers(0, len(ranks) - 1), min_size=1, max_size=3)):
                held = HeldRows(name=name, start=start, stop=stop, row_elements=row, dim=dim, at=ends[rank])
                ranks[rank].append(held)
                ends[rank] += stop - start
    return ranks


def own(state: Tensors, key: str, held: list[HeldRows]) -> torch.Tensor:
    """A rank's own tensor: its ranges one behind the other."""
    return torch.cat([state[key].narrow(one.dim, one.start, one.stop - one.start) for one in held], held[0].dim)


def updated(tensor: torch.Tensor, rows: tuple[LocalRows, ...]) -> torch.Tensor:
    return torch.cat([tensor.narrow(one.dim, one.at, one.num_rows) for one in rows], rows[0].dim)


def state_of(state: Tensors, ownership: Ownership, more: Sequence[str] = ()) -> Tensors:
    """What a rank's optimizer holds: the rows that it updates, of all kinds and those of `more`."""
    found: Tensors = {}
    for name, rows in ownership.updated_rows.items():
        found[f"step/{name}"] = state[f"step/{name}"]
        for kind in (*KINDS, *more):
            found[f"{kind}/{name}"] = updated(own(state, f"{kind}/{name}", ownership.held_rows[name]), rows)
    return found


def ownerships(cut: Cut, shard: bool) -> list[Ownership]:
    clusters = ["a", "b", "a", "b"][: len(cut)]
    return [Ownership(cut, rank, clusters, shard_updates=shard, bucket_elements=32) for rank in range(len(cut))]


@settings(max_examples=20, deadline=None)
@given(written=cuts(), read=cuts(), shard=st.booleans())
def test_what_was_saved_under_one_cut_is_loaded_under_any(
    tmp_path_factory: pytest.TempPathFactory, written: Cut, read: Cut, shard: bool
) -> None:
    """Other stages, other slices, other replicas, updates shared or not: each rank gets what it holds."""
    folder, state = tmp_path_factory.mktemp("cut"), whole_state()
    layout = merge_layouts(
        file.shards
        for one in ownerships(written, shard)
        for file in write_shards(folder, one.rank, shards_to_save(state_of(state, one), one))
    )
    for one in ownerships(read, not shard):
        shapes = {name: own(state, f"weight/{name}", held).shape for name, held in one.held_rows.items()}
        tensors, pieces = allocate_state(shapes, one)
        read_shards(folder, layout, pieces)
        for name, held in one.held_rows.items():
            assert tensors[f"step/{name}"] == state[f"step/{name}"]
            for kind in KINDS:
                assert torch.equal(tensors[f"{kind}/{name}"], own(state, f"{kind}/{name}", held))
