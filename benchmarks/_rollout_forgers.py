"""Engines that are honest, on this chip and on unlike ones, engines that forge, and the audits of their samples.

An honest engine on another chip is played by other shapes of the arithmetic (tiles of other rows), and in 16 bits by
one that computes in 16 bits where the auditor computes in 32. `forged` says what a forger does to honest samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from transformers import Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from isthmus.rl.audit.judge_sample import BF16_BOUNDS, FP32_BOUNDS, AuditBounds
from isthmus.rl.audit.trajectory_auditor import SampleClaim, TrajectoryAuditor
from isthmus.rl.ledger.ledger_records import SampleRecord, TokenRange
from isthmus.rl.ledger.rollout_events import SampleKey
from isthmus.rl.rollout.engine_messages import EndReport, Sampling, StartSample, TokensReport
from isthmus.rl.rollout.engine_runner import EngineRunner
from isthmus.rl.rollout.trajectory import Trajectory
from isthmus.serve import PagedEngine, PagedEngineConfig
from isthmus.serve.draw_token import draw_token
from isthmus.serve.paged.paged_engine import DrawToken

CONFIG = Qwen3Config(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, max_position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip
LENGTH, SLOTS = 8, 64
SAMPLING = Sampling(seed=5, temperature=1.0, max_response_tokens=LENGTH, stop_tokens=frozenset())
MAX_SAMPLES = 64
"""Samples within which a forger is to be found."""
SUBTLE = {("bf16", "weights of the step before")}
"""Smaller than the rounding of 16-bit floats on unlike chips: no audit by bounds can tell them."""
FORGERIES = ("tokens", "log-probabilities", "weights of 8 bits", "weights of the step before")

Weights = Mapping[str, torch.Tensor]


def make_weights(dtype: torch.dtype) -> tuple[Weights, Weights]:
    """Return weights whose logits differ from token to token, and those a step of Adam at rate 1e-4 later."""
    made = torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG)
    old = {name: torch.randn(one.shape, generator=made) / math.sqrt(max(one.shape[-1], 1)) * 2
           if one.dim() > 1 else torch.ones_like(one) for name, one in model.state_dict().items()}  # fmt: skip
    new = {name: one + 1e-4 * torch.sign(torch.randn(one.shape, generator=made)) for name, one in old.items()}
    found = [{name: one.to(dtype) for name, one in weights.items()} for weights in (old, new)]
    for one in found:
        one["lm_head.weight"] = one["model.embed_tokens.weight"]
    return found[0], found[1]


def make_engine(
    weights: Weights, version: int, dtype: torch.dtype, rows: int, draw: DrawToken = draw_token
) -> PagedEngine:
    """Return an engine of `SLOTS` sequences in tiles of `rows`."""
    config = PagedEngineConfig(
        num_pages=2 * SLOTS + 1, page_tokens=16, tile_rows=rows, max_tiles=SLOTS // rows, dtype=dtype
    )
    return PagedEngine(CONFIG, config, version, weights, draw)


def decode_samples(engine: PagedEngine, first: int, count: int) -> list[SampleClaim]:
    """Return what an engine reports for samples number `first` and following, of prompts of 4 tokens."""
    runner = EngineRunner(engine, SAMPLING)
    prompts = {SampleKey(n, 0, 0): tuple((7 * n + at * at + n // 60) % 60 + 1 for at in range(4))
               for n in range(first, first + count)}  # fmt: skip
    for key, tokens in prompts.items():
        runner.handle(StartSample(sample=key, lease=1, prompt_tokens=tokens))
    claims = {key: Trajectory() for key in prompts}
    while not runner.is_idle:
        for report in runner.step():
            if isinstance(report, TokensReport):
                claims[report.sample].tokens += report.tokens
                claims[report.sample].log_probabilities += report.log_probabilities
            elif isinstance(report, EndReport) and report.failed:
                raise ValueError("logits that are no numbers")
    whole = TokenRange(start=0, end=LENGTH, version=engine.version, engine="e", owner="o")
    return [
        SampleClaim(sample=SampleRecord(key=key, ranges=[whole]), prompt_tokens=prompts[key], trajectory=one)
        for key, one in claims.items()
    ]


def make_auditor(weights: Weights, dtype: torch.dtype, bounds: AuditBounds, rows: int = 8) -> TrajectoryAuditor:
    """Return an auditor that has version 1 alone."""
    return TrajectoryAuditor(
        lambda version, given, draw: make_engine(given, version, dtype, rows, draw),
        lambda version: weights if version == 1 else None, SAMPLING, "keep", bounds,
    )  # fmt: skip


def forged(kind: str, dtype: torch.dtype, count: int) -> list[SampleClaim]:
    """Return `count` samples of a forger that claims version 1."""
    old, new = make_weights(dtype)
    if kind == "weights of the step before":
        return decode_samples(make_engine(old, 1, dtype, 8), 0, count)
    if kind == "weights of 8 bits":
        return decode_samples(make_engine({name: _in_8_bits(one) for name, one in new.items()}, 1, dtype, 8), 0, count)
    honest = decode_samples(make_engine(new, 1, dtype, 8), 0, count)
    if kind == "tokens":  # copies one good response for all samples
        tokens = honest[0].trajectory.tokens
        return [replace(one, trajectory=replace(one.trajectory, tokens=list(tokens))) for one in honest]
    halved = [[value / 2 for value in one.trajectory.log_probabilities] for one in honest]
    return [
        replace(one, trajectory=replace(one.trajectory, log_probabilities=values))
        for one, values in zip(honest, halved, strict=True)
    ]


def problems(auditor: TrajectoryAuditor, claims: list[SampleClaim]) -> list[str]:
    """Return what is wrong with each sample, "" for nothing."""
    found = [one[1] for one in auditor.audit_all(claims) if one is not None]
    if len(found) != len(claims):
        raise ValueError("version 1 is not there")
    return found


def find_forgers() -> Iterator[tuple[str, str, int | None]]:
    """Yield precision, forgery, and the number from 1 of the first sample that an audit finds, None for none."""
    for precision, dtype, bounds in (("fp32", torch.float32, FP32_BOUNDS), ("bf16", torch.bfloat16, BF16_BOUNDS)):
        _, weights = make_weights(dtype)
        for kind in FORGERIES:
            found = problems(make_auditor(weights, dtype, bounds), forged(kind, dtype, MAX_SAMPLES))
            yield precision, kind, next((number for number, one in enumerate(found, 1) if one), None)


def honest_problems(kind: str, count: int) -> Iterator[str]:
    """Yield what audits say of `count` samples of honest engines: "fp32", of 1 row a tile, or "bf16" against fp32."""
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    _, weights = make_weights(dtype)
    engine = make_engine(weights, 1, dtype, 1 if kind == "fp32" else 8)
    bounds = FP32_BOUNDS if kind == "fp32" else BF16_BOUNDS
    auditor = make_auditor({name: one.float() for name, one in weights.items()}, torch.float32, bounds, 8)
    for first in range(0, count, SLOTS):
        yield from problems(auditor, decode_samples(engine, first, min(SLOTS, count - first)))


def _in_8_bits(weights: torch.Tensor) -> torch.Tensor:
    """Return weights rounded to 256 levels."""
    scale = weights.abs().max() / 127
    return (weights / scale).round() * scale
