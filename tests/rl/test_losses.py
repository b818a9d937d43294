"""Rules of the losses: answers worked out by hand, gradients by differences, and named errors for bad input."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import InputError
from isthmus.rl import (
    advantages,
    correction,
    k3_penalty,
    overlong_penalty,
    policy_loss,
)

NAN = float("nan")
LOGP = [[-1.0, -2.0, -0.5], [-0.25, -3.0, -1.5]]
MASK = [[1, 1, 0], [1, 1, 1]]


def tensor(values: object) -> torch.Tensor:
    """Return float64 values: what is compared is the formula, without rounding."""
    return torch.tensor(values, dtype=torch.float64)


def ratios(values: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities now and before whose ratios are `values`, now below 0 throughout."""
    old = torch.full((len(values), len(values[0])), -3.0, dtype=torch.float64)
    return old + tensor(values).log(), old


def loss(ratio: list[list[float]], advantage: object, mask: object = None, **options: object) -> float:
    """Return the loss of given ratios; by default every token counts, with DAPO's bounds."""
    now, old = ratios(ratio)
    kept = torch.ones_like(now) if mask is None else tensor(mask)
    chosen = {"clip": (0.2, 0.28), "clip_dual": 3.0, "aggregate": "token", **options}
    return float(policy_loss(now, old, tensor(advantage), kept, **chosen))


def test_advantages_by_hand() -> None:
    """(r - mean) / (std + epsilon) with the unbiased deviation: of 1, 0, 0, 1 it is 1 / sqrt 3."""
    found = advantages(tensor([1, 0, 0, 1, 2, 2, 2, 2]), 4, epsilon=0.0)
    root = math.sqrt(3) / 2
    assert found[:4].tolist() == pytest.approx([root, -root, -root, root])
    assert found[4:].isnan().all()  # 0 / 0: hence epsilon
    assert advantages(tensor([2, 2, 2, 2]), 4).tolist() == [0, 0, 0, 0]
    assert advantages(tensor([1, 0, 0, 1]), 2, by_std=False).tolist() == [0.5, -0.5, -0.5, 0.5]


def test_a_ratio_is_clipped_on_the_side_that_would_gain() -> None:
    """Above 1.28 for good samples, below 0.8 for bad ones; on the other side it counts, up to the dual bound."""
    for ratio, good, bad in ((1.0, -1, 1), (1.5, -1.28, 1.5), (0.5, -0.5, 0.8), (4.0, -1.28, 3.0)):
        assert loss([[ratio]], [1.0]) == pytest.approx(good)
        assert loss([[ratio]], [-1.0]) == pytest.approx(bad)
    assert loss([[4.0]], [-1.0], clip_dual=None) == pytest.approx(4.0)
    assert loss([[1.5]], [1.0], clip=0.2) == pytest.approx(-1.2)


def test_aggregates_by_hand() -> None:
    """Losses -1, -1 and 2, 2, 2 of two samples of 3 places: over 5 tokens, as a mean of means, and over 6 places."""
    case = [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], [1.0, -2.0], MASK
    assert loss(*case, aggregate="token") == pytest.approx(4 / 5)
    assert loss(*case, aggregate="sequence") == pytest.approx((-1 + 2) / 2)
    assert loss(*case, aggregate="constant") == pytest.approx(4 / 6)


def test_weights_multiply_the_policy_term_alone() -> None:
    """With ratio 1, advantage 1, weight 0.5 and a k3 of e - 2 by kl 0.1: -0.5 + 0.1 (e - 2)."""
    logp = tensor([[-2.0]])
    found = policy_loss(
        logp, logp, tensor([1.0]), tensor([[1]]), clip=0.2, clip_dual=None, aggregate="token",
        weights=tensor([[0.5]]), ref_logp=tensor([[-1.0]]), kl=0.1,
    )  # fmt: skip
    assert float(found) == pytest.approx(-0.5 + 0.1 * (math.e - 2))
    assert float(k3_penalty(tensor([-1.0]), tensor([-1.0]))) == 0


def test_corrections_by_hand() -> None:
    """Ratios e and 1/e of tokens; their product of a sample; cut above one bound, dropped outside a pair."""
    logp, rollout = tensor([[-1.0, -2.0, NAN]]), tensor([[-2.0, -1.0, 7.0]])
    mask = tensor([[1, 1, 0]])
    assert correction(logp, rollout, mask, level="token", truncate=2.0)[0].tolist() == pytest.approx(
        [2.0, 1 / math.e, 0]
    )
    assert correction(logp, rollout, mask, level="token", truncate=(0.5, 3.0))[0].tolist() == pytest.approx(
        [math.e, 0, 0]
    )
    assert correction(logp, rollout, mask, level="sequence", truncate=2.0)[0].tolist() == [1, 1, 0]


def test_the_overlong_penalty_is_a_slope() -> None:
    """Of 8 tokens with a buffer of 2: nothing up to 6, half at 7, all at 8 and beyond."""
    found = overlong_penalty(torch.tensor([1, 6, 7, 8, 9]), 8, buffer=2, penalty=1.5)
    assert found.tolist() == [0, 0, -0.75, -1.5, -1.5]


@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
def test_the_gradient_is_the_slope_of_the_loss(aggregate: str) -> None:
    """By differences, with clipped, dual-clipped and free tokens, weights and a penalty; 0 outside the mask."""
    torch.manual_seed(3)
    old = -torch.rand(4, 5, dtype=torch.float64) * 3 - 2
    logp = (old + torch.randn(4, 5, dtype=torch.float64) * 0.5).requires_grad_()
    mask = torch.tensor([[1] * n + [0] * (5 - n) for n in (5, 3, 1, 4)])
    advantage, weights = torch.randn(4, dtype=torch.float64), torch.rand(4, 5, dtype=torch.float64)

    def call(now: torch.Tensor) -> torch.Tensor:
        return policy_loss(
            now, old, advantage, mask, clip=(0.2, 0.28), clip_dual=1.5, aggregate=aggregate, weights=weights,
            ref_logp=old - 0.1, kl=0.04,
        )  # fmt: skip

    assert torch.autograd.gradcheck(call, [logp], eps=1e-7, atol=1e-6)
    (slope,) = torch.autograd.grad(call(logp), [logp])
    assert (slope[mask == 0] == 0).all()
    assert (slope[mask == 1] != 0).any()


def test_what_is_outside_the_mask_does_not_count() -> None:
    """NaN, infinity and positive values there change neither loss nor gradient."""
    for junk in (NAN, float("inf"), -float("inf"), 5.0):
        logp = tensor(LOGP)
        logp[0, 2] = junk
        logp.requires_grad_()
        found = policy_loss(
            logp, logp.detach(), tensor([1.0, -2.0]), tensor(MASK), clip=0.2, clip_dual=3.0, aggregate="token",
            ref_logp=logp.detach(), kl=0.1,
        )  # fmt: skip
        found.backward()
        assert float(found.detach()) == pytest.approx(4 / 5)
        assert logp.grad is not None
        assert logp.grad.flatten().tolist() == pytest.approx([-0.2, -0.2, 0, 0.4, 0.4, 0.4])


REWARDS = st.lists(st.floats(-100, 100, width=32), min_size=4, max_size=4)


@given(st.lists(REWARDS, min_size=1, max_size=5), st.floats(-50, 50, width=32))
def test_advantages_are_centred_and_know_no_offset(groups: list[list[float]], offset: float) -> None:
    """They sum to 0 in each group, keep the order of rewards, and do not change when all rewards do alike."""
    rewards = tensor(groups)
    found = advantages(rewards.flatten(), 4).reshape(-1, 4)
    assert found.sum(dim=1).abs().max() < 1e-6
    assert ((rewards[:, :, None] > rewards[:, None]) <= (found[:, :, None] >= found[:, None])).all()
    moved = advantages(rewards.flatten() + offset, 4, by_std=False).reshape(-1, 4)
    assert torch.allclose(moved, advantages(rewards.flatten(), 4, by_std=False).reshape(-1, 4), atol=1e-9)


@given(
    st.lists(st.tuples(st.floats(-6, 0), st.floats(-6, 0), st.booleans()), min_size=1, max_size=8),
    st.floats(0.1, 5),
    st.sampled_from(["token", "sequence"]),
)
def test_corrections_stay_within_their_bounds(tokens: list[tuple[float, float, bool]], high: float, level: str) -> None:
    """From 0 to the bound, 0 outside the mask, and 1 where both policies agree and the bound allows it."""
    logp, rollout = (tensor([[one[place] for one in tokens]]) for place in (0, 1))
    mask = torch.tensor([[True] + [one[2] for one in tokens[1:]]])
    found = correction(logp, rollout, mask, level=level, truncate=high)
    assert ((found >= 0) & (found <= high)).all()
    assert (found[~mask] == 0).all()
    assert torch.allclose(
        correction(logp, logp, mask, level=level, truncate=high), mask * torch.tensor(min(high, 1.0)).double()
    )


@given(st.floats(-30, 0), st.floats(-30, 0))
def test_the_penalty_is_never_negative(now: float, reference: float) -> None:
    """And 0 where both agree."""
    assert float(k3_penalty(tensor(now), tensor(reference))) >= 0


def bad_loss(**changed: object) -> None:
    """Call `policy_loss` with a good batch in which `changed` is another."""
    call = {
        "logp": tensor(LOGP), "old_logp": tensor(LOGP), "advantages": tensor([1, -1]), "mask": tensor(MASK),
        "clip": 0.2, "clip_dual": 3.0, "aggregate": "token", **changed,
    }  # fmt: skip
    policy_loss(*[call.pop(name) for name in ("logp", "old_logp", "advantages", "mask")], **call)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"clip": 0.0}, "clip is 0.0"),
        ({"clip": 1.0}, "clip is 1.0"),
        ({"clip": (0.2, NAN)}, "clip is"),
        ({"clip": (0.1, 0.2, 0.3)}, "clip is"),
        ({"clip_dual": 1.0}, "clip_dual is 1.0"),
        ({"aggregate": "mean"}, "aggregate is 'mean'"),
        ({"kl": -0.1}, "kl is -0.1"),
        ({"kl": 0.1}, "without ref_logp"),
        ({"logp": tensor([[-1.0, 0.5, 0], [-1, -1, -1]])}, r"logp\[0, 1\] is 0.5"),
        ({"old_logp": tensor([[-1.0, -1, 0], [-1, NAN, -1]])}, r"old_logp\[1, 1\] is nan"),
        ({"ref_logp": tensor([[2.0] * 3] * 2), "kl": 0.1}, r"ref_logp\[0, 0\] is 2.0"),
        ({"logp": tensor([[-1.0]])}, "shape"),
        ({"advantages": tensor([1, NAN])}, "advantages has NaN"),
        ({"advantages": tensor([1, 2, 3])}, "advantages has shape"),
        ({"weights": tensor([[1.0]])}, "weights has shape"),
        ({"mask": tensor([[0.5] * 3] * 2)}, "other than 0 and 1"),
        ({"mask": tensor([[0] * 3] * 2)}, "no token"),
    ],
)
def test_bad_input_of_the_loss_is_named(changed: dict[str, object], message: str) -> None:
    """With the value, before anything is computed from it."""
    with pytest.raises(InputError, match=message):
        bad_loss(**changed)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: advantages(tensor([1, 2]), 1), "group 1"),
        (lambda: advantages(tensor([1, 2, 3]), 2), "whole groups of 2"),
        (lambda: advantages(tensor([1, NAN]), 2), "reward nan of sample 1"),
        (lambda: advantages(tensor([float("inf"), 1]), 2), "reward inf of sample 0"),
        (lambda: overlong_penalty(torch.tensor([1]), 8, buffer=0, penalty=1.0), "buffer of 0"),
        (lambda: overlong_penalty(torch.tensor([1]), 8, buffer=9, penalty=1.0), "buffer of 9"),
        (lambda: overlong_penalty(torch.tensor([1]), 8, buffer=2, penalty=NAN), "penalty of nan"),
        (lambda: correct(level="word"), "level is 'word'"),
        (lambda: correct(truncate=0.0), "truncate is 0.0"),
        (lambda: correct(truncate=(2.0, 0.5)), "truncate is"),
        (lambda: correct(rollout=tensor([[-1.0, 0.1, 0], [-1, -1, -1]])), r"rollout_logp\[0, 1\] is 0.1"),
    ],
)
def test_bad_input_is_named(call, message: str) -> None:
    """A group of 1, rewards that are not finite, bounds out of range, log-probabilities above 0."""
    with pytest.raises(InputError, match=message):
        call()


def correct(level: str = "token", truncate: object = 2.0, rollout: torch.Tensor | None = None) -> None:
    """Call `correction` with a good batch but for the arguments."""
    logp = tensor(LOGP)
    correction(logp, logp if rollout is None else rollout, tensor(MASK), level=level, truncate=truncate)
