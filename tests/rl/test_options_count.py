"""Rules of the options of an algorithm: each that a job sets reaches the loss, and changes it as its function says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isthmus.core.job_parts.rl_job import RlConfig
from isthmus.rl import correction, policy_loss
from isthmus.rl.process.policy_batches import PolicyMicroBatches, make_policy_batches
from isthmus.rl.rollout.trajectory import PolicyBatch
from isthmus.train.model.stage_model import IGNORED_LABEL

COUNT, PROMPT, LENGTH = 4, 3, 9
MADE = torch.Generator().manual_seed(5)
NOW, SAMPLED, OLD, FIRST = (-3 * torch.rand(COUNT, LENGTH, generator=MADE) for _ in range(4))
SAMPLED, OLD = NOW + 0.9 * (SAMPLED + 1.5), NOW + 0.4 * (OLD + 1.5)
SAMPLED, OLD = SAMPLED.clamp(max=0.0), OLD.clamp(max=0.0)
REWARDS = torch.tensor([1.0, -1.0, 0.5, -0.5])


class Model:
    """A last stage whose log-probabilities are given."""

    def token_losses(self, hidden: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
        """Return the losses of the labels."""
        return torch.where(labels != IGNORED_LABEL, -hidden / temperature, 0.0)


def config(**changed: Any) -> RlConfig:
    """Return the options of a job."""
    return RlConfig(
        **({"max_prompt_tokens": PROMPT, "max_response_tokens": 6, "group": 2, "reward": {"exact": True}} | changed)
    )


def batch() -> PolicyBatch:
    """Return samples of unlike lengths, with an observation inside one."""
    lengths = torch.tensor([6, 9, 8, 5])
    places = torch.arange(LENGTH + 1)
    sampled = (places >= PROMPT) & (places < lengths[:, None])
    sampled[1, 5:7] = False
    logp = torch.zeros(COUNT, LENGTH + 1)
    logp[:, 1:] = SAMPLED
    return PolicyBatch(
        keys=(), tokens=torch.ones(COUNT, LENGTH + 1, dtype=torch.int64), lengths=lengths, sampled=sampled,
        prompt_lengths=torch.full((COUNT,), PROMPT), rollout_logp=torch.where(sampled, logp, 0.0), advantages=REWARDS,
        metrics={},
    )  # fmt: skip


def loss_of(rl: RlConfig, **beside: Any) -> float:
    """Return the loss of all micro-batches of the step."""
    made = make_policy_batches(batch(), rl, LENGTH, 3, (0, COUNT), None, is_first=True, is_last=True)
    split = PolicyMicroBatches(**{**vars(made), **{name: one.split(3) for name, one in beside.items()}})
    return sum(
        float(split.loss(Model(), hidden, labels, number))
        for number, (hidden, labels) in enumerate(zip(NOW.split(3), split.labels, strict=True))
    )


def expected(rl: RlConfig, old: torch.Tensor = SAMPLED, **beside: Any) -> float:
    """Return the loss that the functions of `isthmus.rl` give."""
    mask, weights = batch().sampled[:, 1:], None
    now = NOW / rl.temperature
    if rl.correction is not None:
        own = now if old is SAMPLED else old
        weights = correction(own, SAMPLED, mask, level=rl.correction.level, truncate=rl.correction.truncate)
    if rl.aggregate == "constant":
        mask = mask[:, PROMPT - 1 : PROMPT + 5]
        now, old, weights = (None if one is None else one[:, PROMPT - 1 : PROMPT + 5] for one in (now, old, weights))
        beside = {name: one[:, PROMPT - 1 : PROMPT + 5] for name, one in beside.items()}
    return float(
        policy_loss(
            now, old, REWARDS, mask, clip=rl.clip, clip_dual=rl.clip_dual, aggregate=rl.aggregate, weights=weights,
            kl=rl.kl, **beside,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    "changed",
    [
        {}, {"algorithm": "grpo"}, {"clip": (0.05, 0.05)}, {"clip_dual": 1.05}, {"aggregate": "sequence"},
        {"aggregate": "constant"}, {"correction": {"truncate": 0.7}}, {"correction": {"truncate": (0.8, 1.1)}},
        {"correction": {"level": "sequence", "truncate": 0.7}}, {"temperature": 1.5},
        {"correction": {"level": "sequence", "truncate": (0.8, 1.1)}},
    ],
)  # fmt: skip
def test_each_option_changes_the_loss_as_its_function_says(changed: dict[str, Any]) -> None:
    """Over micro-batches of unlike sizes, with observations masked; to 1e-6 of the whole step's loss."""
    rl = config(**changed)
    assert loss_of(rl) == pytest.approx(expected(rl), rel=1e-6, abs=1e-7)
    assert not changed or loss_of(rl) != pytest.approx(loss_of(config()), rel=1e-4)


def test_recomputed_and_reference_log_probabilities_count() -> None:
    """Ratios are then against the weights at the start of the step; correction is these over the engine's."""
    for changed in ({"old": "recomputed"}, {"old": "recomputed", "correction": {"truncate": 0.7}}):
        rl = config(**changed)
        assert loss_of(rl, old_logp=OLD) == pytest.approx(expected(rl, OLD), rel=1e-6)
        assert loss_of(rl, old_logp=OLD) != pytest.approx(loss_of(rl), rel=1e-4)
    rl = config(kl=0.5)
    assert loss_of(rl, reference_logp=FIRST) == pytest.approx(expected(rl, ref_logp=FIRST), rel=1e-6)
    assert loss_of(rl, reference_logp=FIRST) > loss_of(config()) + 0.01
