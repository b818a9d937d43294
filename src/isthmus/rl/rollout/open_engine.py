"""`open_engine`: the paged engine of a job, with sizes that all engines of the job share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch

from isthmus.core.errors import InputError
from isthmus.core.job import Job
from isthmus.core.plan_parts.rollout_place import RolloutPlace
from isthmus.rl.rollout.engine_messages import Sampling
from isthmus.serve import DrawToken, PagedEngine, PagedEngineConfig, draw_token
from isthmus.train.model.transformers_model import read_transformers_config

PAGE_TOKENS = 16
TILE_ROWS = (64, 32, 8, 1)
"""Sizes of tiles, of which the first is taken that is not above the samples of a step and conforms on this chip."""
MAX_ROWS = 256
"""Most rows of a step, and samples that an engine decodes at once."""


_NO_CONFIGURATION = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"})
"""What a configuration says of its folder and its library."""


def engine_slots(job: Job, num_engines: int = 1, place: RolloutPlace | None = None) -> int:
    """Return how many samples an engine decodes at once: what the plan says of its place.

    Where it says nothing, all engines together decode those that may be trained in time.
    """
    if place is not None and place.sequences is not None:
        return min(place.sequences, MAX_ROWS)
    ahead = 1 if job.rl is None else 1 + job.rl.max_staleness
    return min(-(-job.training.global_batch_size * ahead // num_engines), MAX_ROWS)


def engine_dtype(job: Job) -> torch.dtype:
    """Return the dtype in which the job's engines compute."""
    return torch.float32 if job.training.precision == "fp32" else torch.bfloat16


def model_digest(job: Job) -> str:
    """Return a name of the model's configuration, the same wherever its folder lies."""
    values = read_transformers_config(job.model).to_dict()
    known = {name: value for name, value in values.items() if name not in _NO_CONFIGURATION}
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()


def open_engine(
    job: Job, version: int, weights: Mapping[str, torch.Tensor], device: torch.device, num_engines: int = 1,
    draw: DrawToken = draw_token, place: RolloutPlace | None = None, samples: bool = False,
) -> PagedEngine:  # fmt: skip
    """Return one of `num_engines` engines, with weights `version`, of the sizes that the plan has for its `place`.

    One that `samples` what is trained on records routing, where the job replays it. Raises `InputError` for a model
    that it cannot decode.
    """
    if job.rl is None:
        raise ValueError(f"job {job.name} has task {job.task}")
    slots = engine_slots(job, num_engines, place)
    longest = -(-(job.rl.max_prompt_tokens + job.rl.max_response_tokens) // PAGE_TOKENS)
    pages = longest * slots
    if place is not None and place.cache_tokens is not None:
        pages = max(longest, min(pages, place.cache_tokens // PAGE_TOKENS))
    config = read_transformers_config(job.model)
    for rows in TILE_ROWS:
        sizes = PagedEngineConfig(
            num_pages=pages + 1, page_tokens=PAGE_TOKENS, tile_rows=rows, max_tiles=-(-slots // rows),
            max_sequences=slots, dtype=engine_dtype(job), device=device,
            records_routing=job.rl.replay_routing and samples,
        )  # fmt: skip
        try:
            if rows <= job.training.global_batch_size or rows == 1:
                return PagedEngine(config, sizes, version, weights, draw)
        except InputError:
            if rows == 1:
                raise
    raise AssertionError("tiles of one row always fit")


def sampling_of(job: Job, stop_tokens: frozenset[int]) -> Sampling:
    """Return how the responses of the job are drawn; one of `stop_tokens` ends a turn."""
    if job.rl is None:
        raise ValueError(f"job {job.name} has task {job.task}")
    return Sampling(
        seed=job.training.seed, temperature=job.rl.temperature, max_response_tokens=job.rl.max_response_tokens,
        stop_tokens=stop_tokens,
    )  # fmt: skip
