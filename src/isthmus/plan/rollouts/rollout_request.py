"""`RolloutRequest`: what the functions of this folder need to know of a job and a pool, worked out once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from isthmus.core.chip import Chip
from isthmus.core.job import Job
from isthmus.core.job_parts.rl_job import RlConfig
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.plan.memory.memory_limit import device_bytes
from isthmus.plan.profile.layer_profile import ModelProfile
from isthmus.plan.rollouts.advise_sequences import MAX_SEQUENCES, PAGE_TOKENS, advise_sequences
from isthmus.plan.rollouts.decode_rates import decode_rates, element_bytes
from isthmus.plan.rollouts.response_lengths import response_lengths
from isthmus.plan.rollouts.weights_ways import LinkRate, coding_s, link_rates, version_bytes
from isthmus.plan.search.costs.slots import FreeChips
from isthmus.plan.search.finish.score_plan import calibration_for
from isthmus.plan.time.calibration import Calibration
from isthmus.plan.time.chip_rates import complete_calibration
from isthmus.plan.time.predict import forward_pass_s
from isthmus.sim import DecodeRates

USABLE_SHARE = 0.9
"""Share of a chip's memory that weights, rows and cache of an engine may take."""


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """A job with `task: rl` on a pool of which `free_chips` (None: all) are free."""

    job: Job
    pool: Pool
    profile: ModelProfile
    free_chips: FreeChips | None = None

    @property
    def rl(self) -> RlConfig:
        """Return what the job says of its samples."""
        if self.job.rl is None:
            raise ValueError(f"job {self.job.name} has task {self.job.task}")
        return self.job.rl

    @cached_property
    def calibration(self) -> Calibration:
        """Return the calibration of the pool, with the rates that its chips state."""
        chips = [self.pool.chip(group) for cluster in self.pool.clusters for group in cluster.node_groups]
        return complete_calibration(calibration_for(self.pool), chips, self.job.stack)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Return the lengths of responses to count with."""
        return response_lengths(self.rl)

    @cached_property
    def rates(self) -> dict[tuple[str, str], LinkRate]:
        """Return the rates of all links."""
        return link_rates(self.pool, self.calibration)

    @cached_property
    def version_bytes(self) -> float:
        """Return the bytes of a version as it is sent."""
        return version_bytes(self.profile, self.job)

    @cached_property
    def coding_s(self) -> float:
        """Return the seconds in which a core codes a version."""
        return coding_s(self.profile, self.job)

    @property
    def num_passes(self) -> int:
        """Return the forward passes of a step beside training: for recomputed old log-probabilities, and for `kl`."""
        return int(self.rl.old == "recomputed") + int(self.rl.kl > 0)

    def train_s(self, plan: Plan) -> float:
        """Return the seconds of training on the samples of a step by a plan with its prediction, passes included."""
        if plan.predicted is None:
            raise ValueError(f"plan {plan.id} has no prediction")
        pass_s = forward_pass_s(plan, self.pool, self.profile, self.calibration) if self.num_passes else 0.0
        return plan.predicted.iteration_s + self.num_passes * pass_s

    @property
    def num_samples(self) -> int:
        """Return the samples of a step."""
        return self.job.training.global_batch_size

    @property
    def num_in_flight(self) -> int:
        """Return the samples that may be decoded at once, all engines together, to be trained in time."""
        return self.num_samples * (1 + self.rl.max_staleness)

    @property
    def longest_tokens(self) -> int:
        """Return the tokens of whole pages that the longest sample takes."""
        longest = self.rl.max_prompt_tokens + self.rl.max_response_tokens
        return -(-longest // PAGE_TOKENS) * PAGE_TOKENS

    def free(self, cluster: str) -> dict[str, int]:
        """Return the free chips of a cluster by node group."""
        if self.free_chips is not None:
            return dict(self.free_chips.get(cluster, {}))
        return {group.name: group.num_chips for group in self.pool.cluster(cluster).node_groups}

    def decode_rates(self, chip: Chip, sequences: int) -> DecodeRates:
        """Return the rates of an engine on a chip."""
        return decode_rates(self.profile, chip, self.calibration, self.job, sequences)

    def cache_tokens(self, chip: Chip, taken_bytes: float = 0.0) -> int:
        """Return the tokens whose keys and values fit beside two versions of the weights and the rows of a step."""
        size = element_bytes(self.job)
        weights = 2 * size * self.profile.num_parameters
        rows = MAX_SEQUENCES * 4 * (self.profile.vocab_size + 8 * self.profile.hidden_size)
        left = USABLE_SHARE * device_bytes(chip) - taken_bytes - weights - rows
        each = self.profile.kv_cache_bytes_per_token(size)
        whole = (self.longest_tokens + PAGE_TOKENS) * MAX_SEQUENCES
        return max(0, min(int(left / each), whole)) if each else whole

    def advised(self, chip: Chip, taken_bytes: float = 0.0) -> int:
        """Return the sequences that a chip decodes at once without evicting any."""
        key = (chip.name, chip.memory_bytes, chip.reported_bytes, round(taken_bytes))
        if key not in self._advised:
            self._advised[key] = advise_sequences(
                self.cache_tokens(chip, taken_bytes), self.rl.max_prompt_tokens, self.lengths, self.num_in_flight
            )
        return self._advised[key]

    @cached_property
    def _advised(self) -> dict[tuple[object, ...], int]:
        return {}
