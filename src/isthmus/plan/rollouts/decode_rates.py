"""`decode_rates`: the seconds of a decode step on a chip, from its data sheet and micro-benchmarks.

A step reads every weight and the keys and values of all cached tokens at the memory's bandwidth, computes the products
of its rows at the chip's rate, and its kernels are launched by the host. Shares of the rates are those of a calibration
(`isthmus calibrate --measure`); no run is fitted.
"""

from __future__ import annotations

from isthmus.core.chip import Chip
from isthmus.core.job import Job
from isthmus.plan.profile.layer_profile import ModelProfile
from isthmus.plan.time.calibration import Calibration, ChipRates
from isthmus.sim import DecodeRates

TILE_ROWS = (64, 32, 8, 1)
"""Rows that the engine computes at once: the first that is not above the samples of a step."""


def element_bytes(job: Job) -> int:
    """Return the bytes of a weight, and of an element of the cache, in the job's engines."""
    return 4 if job.training.precision == "fp32" else 2


def decode_rates(profile: ModelProfile, chip: Chip, calibration: Calibration, job: Job, sequences: int) -> DecodeRates:
    """Return the rates of a chip that decodes `sequences` at once; of experts it reads those that these rows need."""
    rates, size = ChipRates.of(calibration, chip.name), element_bytes(job)
    bytes_per_s = chip.memory_bandwidth_bytes_per_s * rates.memory_share
    flop_per_s = chip.flop_per_s("fp32" if size == 4 else "bf16") * rates.matmul_share
    parts = [part for layer in profile.layers for part in layer.components]
    weights = sum(part.weight_bytes_read(sequences, size) for part in (*parts, profile.final_norm))
    weights += profile.vocab_size * profile.hidden_size * size
    one_token = sum(layer.forward_flops(1, 1) for layer in profile.layers)
    one_token += 2 * profile.vocab_size * profile.hidden_size
    return DecodeRates(
        host_s=rates.launch_s * profile.num_layers,
        weights_s=weights / bytes_per_s,
        row_s=one_token / flop_per_s * rates.bias_factor,
        cached_token_s=profile.kv_cache_bytes_per_token(size) / bytes_per_s,
        tile_rows=next(rows for rows in TILE_ROWS if rows <= job.training.global_batch_size),
    )
