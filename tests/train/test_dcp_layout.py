"""Rules of the layout on disk: written by each rank alone, read under any cut, and by torch's own tools."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from isthmus.core.errors import UnavailableError
from isthmus.train.checkpoint.dcp_layout import TensorShard, rank_file_name, read_shards, write_metadata, write_shards

Model = dict[str, torch.Tensor]


def cut(name: str, whole: torch.Tensor, dim: int, ends: Sequence[int]) -> list[TensorShard]:
    """Cut a tensor along `dim` behind each of `ends`; empty parts are left out."""
    bounds = itertools.pairwise([0, *sorted(set(ends) - {0, whole.shape[dim]}), whole.shape[dim]])
    return [
        TensorShard(
            name,
            tuple(whole.shape),
            tuple(start if one == dim else 0 for one in range(whole.dim())),
            whole.narrow(dim, start, stop - start),
        )
        for start, stop in bounds
    ]


def write(folder: Path, ranks: Sequence[Sequence[TensorShard]]) -> None:
    """Write the pieces of every rank, and the metadata."""
    write_metadata(folder, [write_shards(folder, rank, pieces) for rank, pieces in enumerate(ranks)])


def blank(pieces: Sequence[TensorShard]) -> list[TensorShard]:
    """The same boxes, with nothing in them."""
    return [TensorShard(one.name, one.shape, one.offsets, torch.full_like(one.tensor, 77)) for one in pieces]


@st.composite
def models(draw: st.DrawFn) -> Model:
    shapes = draw(st.lists(st.lists(st.integers(1, 6), max_size=3), min_size=1, max_size=4))
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8])
    model = {}
    for number, shape in enumerate(shapes):
        numbers = torch.arange(math.prod(shape)) + 10 * number
        model[f"weight/{number}"] = numbers.view(shape).to(draw(dtypes))
    return model


def dealt(draw: st.DrawFn, model: Model, num_ranks: int) -> list[list[TensorShard]]:
    """Cut every tensor somehow, and give each part to some rank."""
    ranks: list[list[TensorShard]] = [[] for _ in range(num_ranks)]
    for name, tensor in model.items():
        pieces = [TensorShard.full(name, tensor)]
        if tensor.dim():
            dim = draw(st.integers(0, tensor.dim() - 1))
            pieces = cut(name, tensor, dim, draw(st.lists(st.integers(0, tensor.shape[dim]), max_size=3)))
        for piece in pieces:
            ranks[draw(st.integers(0, num_ranks - 1))].append(piece)
    return ranks


@settings(max_examples=15, deadline=None)
@given(data=st.data(), model=models(), written=st.integers(1, 3), read=st.integers(1, 3))
def test_a_model_written_under_one_cut_is_read_under_any(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, model: Model, written: int, read: int
) -> None:
    """Whatever boxes which ranks wrote, whatever boxes are asked for hold what was in their place."""
    folder = tmp_path_factory.mktemp("layout")
    write(folder, dealt(data.draw, model, written))
    for wanted in dealt(data.draw, model, read):
        found = blank(wanted)
        read_shards(folder, found)
        for piece, expected in zip(found, wanted, strict=True):
            assert torch.equal(piece.tensor, expected.tensor)


def test_torch_reads_it(tmp_path: Path) -> None:
    """`torch.distributed.checkpoint.load` and `dcp_to_torch_save` give the whole model."""
    model = {"weight/a": torch.randn(6, 4), "step/a": torch.tensor(3.0)}
    first, second = cut("weight/a", model["weight/a"], 0, [2])
    write(tmp_path, [[first], [second, TensorShard.full("step/a", model["step/a"])]])
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        ".metadata",
        rank_file_name(0),
        rank_file_name(1),
    ]
    loaded = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is only one process
        dcp.load(loaded, checkpoint_id=tmp_path)
        dcp_to_torch_save(tmp_path, tmp_path / "one.pt")
    for found in (loaded, torch.load(tmp_path / "one.pt")):
        assert found.keys() == model.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in model.items())


def test_what_two_ranks_hold_alike_is_written_once(tmp_path: Path) -> None:
    """The same tensor of two ranks (an update count) is one in the checkpoint."""
    same = TensorShard.full("step/a", torch.tensor(3.0))
    write(tmp_path, [[same], [same]])
    found = blank([same])
    read_shards(tmp_path, found)
    assert float(found[0].tensor) == 3.0


def test_a_gap_is_no_checkpoint(tmp_path: Path) -> None:
    """Where the ranks together did not write a whole tensor, there is no metadata."""
    first, second, third = cut("weight/a", torch.randn(6, 4), 0, [2, 4])
    parts = [write_shards(tmp_path, rank, [one]) for rank, one in enumerate((first, third))]
    with pytest.raises(UnavailableError, match="do not form a complete model"):
        write_metadata(tmp_path, parts)
    assert not (tmp_path / ".metadata").exists()
    write_metadata(tmp_path, [*parts, write_shards(tmp_path, 2, [second])])


def test_another_model_is_refused(tmp_path: Path) -> None:
    """A tensor that is missing, or of another shape, is named."""
    write(tmp_path, [[TensorShard.full("weight/a", torch.zeros(3))]])
    with pytest.raises(UnavailableError, match="has no tensor 'weight/b'"):
        read_shards(tmp_path, [TensorShard.full("weight/b", torch.zeros(3))])
    with pytest.raises(UnavailableError, match=r"holds 'weight/a' as \[3\], the model as \[4\]"):
        read_shards(tmp_path, [TensorShard.full("weight/a", torch.zeros(4))])
