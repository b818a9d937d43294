"""Rules of the layout on disk: written by each rank alone, read under any cut, and by torch's own tools."""

from __future__ import annotations

import hashlib
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
from safetensors.torch import load_file

from isthmus.core.errors import UnavailableError
from isthmus.train.checkpoint.layout.checkpoint_layout import CheckpointLayout, check_layout, merge_layouts
from isthmus.train.checkpoint.layout.shard_files import WrittenFile, rank_file_name, read_shards, write_shards
from isthmus.train.checkpoint.layout.tensor_shard import TensorShard

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


def layout_of(files: Sequence[WrittenFile]) -> CheckpointLayout:
    """Return the checked layout of what ranks have written."""
    layout = merge_layouts(one.shards for one in files)
    check_layout(layout, {one.name: one.num_bytes for one in files}, "test")
    return layout


def write(folder: Path, ranks: Sequence[Sequence[TensorShard]]) -> CheckpointLayout:
    """Write the shards of every rank; return their layout."""
    return layout_of([one for rank, shards in enumerate(ranks) for one in write_shards(folder, rank, shards)])


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
    layout = write(folder, dealt(data.draw, model, written))
    for wanted in dealt(data.draw, model, read):
        found = blank(wanted)
        read_shards(folder, layout, found)
        for piece, expected in zip(found, wanted, strict=True):
            assert torch.equal(piece.tensor, expected.tensor)


def test_torch_reads_it(tmp_path: Path) -> None:
    """`torch.distributed.checkpoint.load` with `HuggingFaceStorageReader` gives the whole model.

    Also where a rank has several ranges of one tensor, which takes several files, and where two ranks have the same.
    """
    model = {"weight/a": torch.randn(6, 4), "step/a": torch.tensor(3.0), "rng/0": torch.arange(5, dtype=torch.uint8)}
    first, second, third = cut("weight/a", model["weight/a"], 0, [2, 3])
    step = TensorShard.full("step/a", model["step/a"])
    write(tmp_path, [[TensorShard.full("rng/0", model["rng/0"]), first, third, step], [second, step]])
    names = [rank_file_name(0, 1, 2), rank_file_name(0, 2, 2), rank_file_name(1)]
    assert sorted(one.name for one in tmp_path.iterdir()) == names
    loaded = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is only one process
        dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.items())


def test_a_file_is_safetensors_with_the_stated_checksum(tmp_path: Path) -> None:
    """Any reader of safetensors opens a file, whatever the data types in it; size and SHA-256 are those on disk."""
    tensors = {
        "rng/0": torch.arange(3, dtype=torch.uint8),
        "a": torch.randn(3),
        "b": torch.ones(2, dtype=torch.bfloat16),
    }
    (written,) = write_shards(tmp_path, 4, [TensorShard.full(name, one) for name, one in tensors.items()])
    data = (tmp_path / written.name).read_bytes()
    assert (written.num_bytes, written.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    found = load_file(tmp_path / written.name)
    assert all(torch.equal(found[name], one) for name, one in tensors.items())


def test_large_shards_cut_in_columns_are_read_in_pieces(tmp_path: Path) -> None:
    """Columns of a shard larger than the piece that is read at once arrive whole."""
    whole = torch.arange(5 << 20, dtype=torch.float32).view(-1, 1024)
    layout = write(tmp_path, [cut("weight/a", whole, 0, [1000])])
    found = blank(cut("weight/a", whole, 1, [100, 101]))
    read_shards(tmp_path, layout, found)
    for one, expected in zip(found, cut("weight/a", whole, 1, [100, 101]), strict=True):
        assert torch.equal(one.tensor, expected.tensor)


def test_what_two_ranks_hold_alike_is_read_once(tmp_path: Path) -> None:
    """The same tensor of two ranks (an update count) is one in the layout."""
    same = TensorShard.full("step/a", torch.tensor(3.0))
    layout = write(tmp_path, [[same], [same]])
    assert len(layout.shards) == 1
    found = blank([same])
    read_shards(tmp_path, layout, found)
    assert float(found[0].tensor) == 3.0


def test_a_gap_is_no_checkpoint(tmp_path: Path) -> None:
    """Where the ranks together did not write a whole tensor, there is no layout."""
    first, second, third = cut("weight/a", torch.randn(6, 4), 0, [2, 4])
    files = [one for rank, shard in enumerate((first, third)) for one in write_shards(tmp_path, rank, [shard])]
    with pytest.raises(UnavailableError, match="do not form a complete model"):
        layout_of(files)
    layout_of([*files, *write_shards(tmp_path, 2, [second])])


def test_another_model_is_refused(tmp_path: Path) -> None:
    """A tensor that is missing, or of another shape, is named."""
    layout = write(tmp_path, [[TensorShard.full("weight/a", torch.zeros(3))]])
    with pytest.raises(UnavailableError, match="has no tensor 'weight/b'"):
        read_shards(tmp_path, layout, [TensorShard.full("weight/b", torch.zeros(3))])
    with pytest.raises(UnavailableError, match=r"holds 'weight/a' as \[3\], the model as \[4\]"):
        read_shards(tmp_path, layout, [TensorShard.full("weight/a", torch.zeros(4))])
