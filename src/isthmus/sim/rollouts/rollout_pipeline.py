"""`RolloutPipeline`: what `simulate_rollouts` simulates: a trainer, engines that decode for it, the ways between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isthmus.core.errors import InputError

HERE = ""
"""The site of an engine that decodes on the trainer's own chip, in turns with training."""


@dataclass(frozen=True, kw_only=True)
class DecodeRates:
    """Seconds of a decode step: max(`host_s`, `weights_s`, rows x `row_s`) + cached tokens x `cached_token_s`.

    The products of a step read all weights once and compute each row: a roofline. The attention that follows reads the
    keys and values of all cached tokens. Rows come in tiles of `tile_rows`; the rows of a prompt cost `row_s` each.
    """

    host_s: float
    weights_s: float
    row_s: float
    cached_token_s: float
    tile_rows: int = 1

    def products_s(self, num_rows: int) -> float:
        """Return the seconds of a step of `num_rows` rows without its attention."""
        padded = -(-num_rows // self.tile_rows) * self.tile_rows
        return max(self.host_s, self.weights_s, padded * self.row_s)

    def step_s(self, num_rows: int, cached_tokens: float) -> float:
        """Return the seconds of a step of `num_rows` sequences that have `cached_tokens` together."""
        return self.products_s(num_rows) + cached_tokens * self.cached_token_s


@dataclass(frozen=True, kw_only=True)
class WeightsWay:
    """How a version comes to a site: seconds that it occupies the slowest link of its way, and its delay.

    While one is on its way newer ones wait, and only the newest is sent.
    """

    occupied_s: float
    delay_s: float


@dataclass(frozen=True, kw_only=True)
class DecodeSite:
    """One engine: its sequences at once and its rates; `way` None decodes on the trainer's chip, in turns.

    Orders and reports take `delay_s` each way.
    """

    name: str
    slots: int
    rates: DecodeRates
    way: WeightsWay | None = None
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise InputError(f"engine {self.name} decodes {self.slots} sequences at once", hint="at least 1")


@dataclass(frozen=True, kw_only=True)
class RolloutPipeline:
    """`steps` training steps of `train_s` seconds, each on `batch_prompts` groups of `group` samples.

    Each sample has `prompt_tokens` and a response whose length is drawn from `lengths` by `seed`. A token is trained on
    at most `max_staleness` versions after the one that sampled it, by the rules of the trajectory ledger.
    """

    train_s: float
    steps: int
    group: int
    batch_prompts: int
    max_staleness: int
    lengths: tuple[int, ...]
    prompt_tokens: int
    sites: tuple[DecodeSite, ...]
    on_update: Literal["keep", "refill", "abort"] = "keep"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.sites or not self.lengths or min(self.lengths) < 1:
            raise InputError(
                f"{len(self.sites)} engines, {len(self.lengths)} lengths", hint="give an engine, and lengths from 1"
            )
        if any(one.way is None for one in self.sites) and len(self.sites) > 1:
            raise InputError("an engine in turns with training decodes alone", hint="give all engines a way, or one")
        if min(self.steps, self.group, self.batch_prompts) < 1 or self.max_staleness < 0 or self.train_s < 0:
            raise InputError(
                f"{self.steps} steps of {self.batch_prompts} x {self.group} samples at staleness {self.max_staleness}",
                hint="at least 1 each, staleness and seconds at least 0",
            )


@dataclass(frozen=True, kw_only=True)
class SiteSpans:
    """Seconds of one engine for a step, by what it did: decoded, or waited for samples or for weights."""

    name: str
    decode_s: float
    wait_samples_s: float
    wait_weights_s: float
    tokens: float
    versions: float


@dataclass(frozen=True, kw_only=True)
class RolloutResult:
    """Means over the simulated steps after the first ones, which fill the pipeline."""

    step_s: float
    wait_samples_s: float
    """Seconds of a step for which the trainer waits for samples."""
    staleness: float
    """Mean versions between a group's oldest sample and the step that trains on it."""
    sites: tuple[SiteSpans, ...]
    steps_s: tuple[float, ...]
    """Seconds of each step, the first ones included."""
