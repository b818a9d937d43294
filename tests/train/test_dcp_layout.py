"""Rules of checkpoints of earlier releases: a run resumes from them, and nothing of them is unpickled."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from isthmus.core.errors import UnavailableError
from isthmus.train.checkpoint.checkpoint_folder import load_shards, newest_valid
from isthmus.train.checkpoint.layout.tensor_shard import TensorShard

OLD = Path(__file__).parent / "data" / "checkpoint-v2"
"""Written by the release before layout 3: two ranks, one with two ranges of a tensor, three data types."""


def test_a_checkpoint_of_layout_2_is_read() -> None:
    """Every tensor has the values that the earlier release wrote, under any cut."""
    manifest = newest_valid(OLD)
    assert manifest is not None
    assert (manifest.version, manifest.step, manifest.samples, manifest.num_ranks) == (2, 3, 24, 2)
    found = [
        TensorShard.full("weight/a", torch.zeros(6, 4)),
        TensorShard("weight/a", (6, 4), (1, 1), torch.zeros(5, 2)),
        TensorShard.full("weight/b", torch.zeros(3, dtype=torch.bfloat16)),
        TensorShard.full("step/a", torch.zeros(())),
        TensorShard.full("rng/rank-00001", torch.zeros(8, dtype=torch.uint8)),
    ]
    load_shards(OLD, 3, found)
    whole = torch.arange(24.0).view(6, 4)
    expected = [whole, whole[1:, 1:3], torch.ones(3, dtype=torch.bfloat16), torch.tensor(3.0)]
    for shard, tensor in zip(found, [*expected, torch.arange(8, dtype=torch.uint8)], strict=True):
        assert torch.equal(shard.tensor, tensor)


def test_another_model_is_refused_in_layout_2_as_well() -> None:
    """A tensor of another shape is named."""
    with pytest.raises(UnavailableError, match=r"holds 'weight/a' as \[6, 4\]"):
        load_shards(OLD, 3, [TensorShard.full("weight/a", torch.zeros(4))])


def test_a_metadata_that_points_elsewhere_is_refused(tmp_path: Path) -> None:
    """The archive of a shard lies inside the file that the metadata names."""
    shutil.copytree(OLD / "step-00000003", tmp_path / "step-00000003")
    file = tmp_path / "step-00000003" / ".metadata"
    file.write_bytes(file.read_bytes().replace(b"__0_0.distcp", b"../a0.distcp"))
    with pytest.raises(UnavailableError, match="file"):
        load_shards(tmp_path, 3, [])
    file.write_bytes((OLD / "step-00000003" / ".metadata").read_bytes())
    (tmp_path / "step-00000003" / "__0_0.distcp").write_bytes(b"short")
    with pytest.raises(UnavailableError, match=r"leaves __0_0\.distcp"):
        load_shards(tmp_path, 3, [])
