"""Rules of the check of a finished model: it reads weights and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isthmus.train.process.verify import verify
from tests.train.small_models import write_config
from tests.train.worker_jobs import make_job


def test_pickled_weights_beside_the_result_are_not_read(tmp_path: Path) -> None:
    """A pickle becomes code when it is read; only safetensors are weights of a result."""
    job = make_job(tmp_path, "llama")
    write_config(Path(job.output), "llama", vocab_size=272, pad_token_id=None)
    torch.save({}, Path(job.output) / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        verify(job)
