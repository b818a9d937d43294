"""The losses give what verl and TRL give, to 1e-6; skipped where these are not installed (development only)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isthmus.rl import advantages, correction, k3_penalty, overlong_penalty, policy_loss

GROUP, NUM, LENGTH = 4, 8, 7
WITHIN = {"rtol": 0.0, "atol": 1e-6}


def batch(seed: int) -> SimpleNamespace:
    """Return a batch [8, 7] in two groups, with ratios on both sides of all bounds."""
    numbers = torch.Generator().manual_seed(seed)
    old = -torch.rand(NUM, LENGTH, generator=numbers) * 2 - 2
    logp = old + torch.randn(NUM, LENGTH, generator=numbers) * 0.6
    lengths = torch.tensor([7, 3, 1, 5, 6, 7, 2, 4])
    mask = (torch.arange(LENGTH) < lengths[:, None]).float()
    return SimpleNamespace(
        old=old, logp=logp.clamp(max=-0.01), mask=mask, rollout=old + 0.3 * torch.randn(old.shape, generator=numbers),
        ref=old - 0.2, rewards=torch.tensor([1.0, 0, 0, 1, 0.5, 0, 0, 0]),
        index=torch.arange(NUM) // GROUP,
    )  # fmt: skip


def with_slope(call: Any, logp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a loss and its gradient by `logp` [N, T]."""
    leaf = logp.clone().requires_grad_()
    loss = call(leaf)
    (slope,) = torch.autograd.grad(loss, [leaf])
    return loss.detach(), slope


@pytest.fixture(scope="module")
def verl() -> SimpleNamespace:
    """Return verl's functions."""
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed")
    from verl.trainer.ppo import rollout_corr_helper
    from verl.workers.config import ActorConfig

    return SimpleNamespace(core=core_algos, corr=rollout_corr_helper, config=ActorConfig)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("by_std", [True, False])
def test_advantages_are_those_of_verl(verl: SimpleNamespace, by_std: bool) -> None:
    """GRPO's, and without the deviation."""
    one = batch(0)
    scores = torch.zeros(NUM, LENGTH)
    scores[:, 0] = one.rewards
    theirs, _ = verl.core.compute_grpo_outcome_advantage(
        scores, torch.ones(NUM, LENGTH), one.index.numpy(), norm_adv_by_std_in_grpo=by_std
    )
    torch.testing.assert_close(advantages(one.rewards, GROUP, by_std), theirs[:, 0], **WITHIN)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("mode", "aggregate"), [("token-mean", "token"), ("seq-mean-token-mean", "sequence")])
@pytest.mark.parametrize("weighted", [False, True])
def test_losses_and_gradients_are_those_of_verl(
    verl: SimpleNamespace, mode: str, aggregate: str, weighted: bool
) -> None:
    """DAPO's bounds and the dual clip, with and without the weights of a correction."""
    one = batch(1)
    advantage = advantages(one.rewards, GROUP)[:, None].expand(NUM, LENGTH)
    weights = correction(one.old, one.rollout.clamp(max=0), one.mask, level="token", truncate=2.0) if weighted else None
    settings = verl.config(
        strategy="fsdp", rollout_n=GROUP, ppo_micro_batch_size_per_gpu=1, clip_ratio=0.2, clip_ratio_low=0.2,
        clip_ratio_high=0.28,
    )  # fmt: skip
    theirs = with_slope(
        lambda logp: verl.core.compute_policy_loss_vanilla(
            one.old, logp, advantage, one.mask, mode, settings, rollout_is_weights=weights
        )[0],
        one.logp,
    )
    ours = with_slope(
        lambda logp: policy_loss(
            logp, one.old, advantage, one.mask, clip=(0.2, 0.28), clip_dual=3.0, aggregate=aggregate, weights=weights
        ),
        one.logp,
    )
    torch.testing.assert_close(ours, theirs, **WITHIN)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bounds", [2.0, (0.7, 1.4)])
def test_corrections_are_those_of_verl(verl: SimpleNamespace, level: str, bounds: Any) -> None:
    """Truncated by one bound, masked by two."""
    one = batch(2)
    rollout = one.rollout.clamp(max=0)
    text = bounds if isinstance(bounds, float) else "_".join(map(str, bounds))
    theirs, _ = verl.corr.compute_rollout_correction_weights(one.old - rollout, one.mask, level, text)
    torch.testing.assert_close(
        correction(one.old, rollout, one.mask, level=level, truncate=bounds), theirs * one.mask, **WITHIN
    )


@pytest.mark.filterwarnings("ignore")
def test_the_penalty_is_that_of_verl(verl: SimpleNamespace) -> None:
    """The estimator k3, which verl calls low_var_kl."""
    one = batch(3)
    theirs = verl.core.kl_penalty(one.logp, one.ref, "low_var_kl")
    torch.testing.assert_close(k3_penalty(one.logp, one.ref), theirs, **WITHIN)


@pytest.mark.filterwarnings("ignore")
def test_the_overlong_penalty_is_that_of_trl() -> None:
    """Soft overlong punishment, for all lengths up to the longest."""
    rewards = pytest.importorskip("trl.rewards", reason="TRL is not installed")
    theirs = rewards.get_soft_overlong_punishment(max_completion_len=8, soft_punish_cache=3)
    lengths = list(range(1, 9))
    found = overlong_penalty(torch.tensor(lengths), 8, buffer=3, penalty=1.0)
    assert found.tolist() == pytest.approx(theirs([[0] * one for one in lengths]), abs=1e-6)


def test_the_batch_has_what_it_should() -> None:
    """Ratios beyond each bound, and groups that differ: otherwise the rules above say little."""
    one = batch(1)
    ratio = (one.logp - one.old).exp()[one.mask.bool()]
    assert (ratio < 0.8).any()
    assert (ratio > 1.28).any()
    assert (one.rewards.view(-1, GROUP).std(1) > 0).all()
