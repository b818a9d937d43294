"""Rules of drawing: the distribution is that of the logits; seed, prompt, sample and position decide."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from isthmus.serve import DecodeRequest, SequenceKey
from isthmus.serve.draw_token import draw_number, draw_token

REQUEST = DecodeRequest(key=SequenceKey(0, 0), seed=1, prompt_tokens=(1,), max_response_tokens=4)
LOGITS = np.log(np.array([0.1, 0.2, 0.3, 0.4], dtype=np.float32))


def test_tokens_are_drawn_as_often_as_their_probability() -> None:
    """20,000 draws, within four deviations, at temperatures 1 and 0.5."""
    for temperature, weights in ((1.0, [0.1, 0.2, 0.3, 0.4]), (0.5, [0.01, 0.04, 0.09, 0.16])):
        request = replace(REQUEST, temperature=temperature)
        counts = np.bincount([draw_token(LOGITS, request, at)[0] for at in range(20_000)], minlength=4)
        expected = np.array(weights) / sum(weights)
        assert (abs(counts / 20_000 - expected) < 4 * np.sqrt(expected * (1 - expected) / 20_000)).all()
        for at in range(4):
            token, log_probability = draw_token(LOGITS, request, at)
            assert log_probability == pytest.approx(np.log(expected[token]), abs=1e-6)


def test_each_part_of_the_key_gives_other_draws() -> None:
    """Seed, prompt, sample and position; a new attempt draws the same."""
    others = [
        replace(REQUEST, seed=2), replace(REQUEST, key=SequenceKey(1, 0)), replace(REQUEST, key=SequenceKey(0, 1))
    ]  # fmt: skip
    first = [draw_number(REQUEST, at) for at in range(50)]
    assert len(set(first)) == 50
    assert not any(set(first) & {draw_number(one, at) for at in range(50)} for one in others)
    assert draw_number(replace(REQUEST, key=SequenceKey(0, 0, 3)), 0) == first[0]
    assert all(0 <= one < 1 for one in first)


def test_temperature_zero_takes_the_largest_logit() -> None:
    """The first of equal ones; the log-probability is that at temperature 1."""
    token, log_probability = draw_token(np.array([0, 2, 2, 1], dtype=np.float32), replace(REQUEST, temperature=0.0), 0)
    assert token == 1
    assert log_probability == pytest.approx(2 - np.log(np.exp([0, 2, 2, 1]).sum()))


def test_a_token_without_weight_is_never_drawn() -> None:
    """Logits of minus infinity, at both ends and in between."""
    logits = np.array([-np.inf, 0, -np.inf, 0, -np.inf], dtype=np.float32)
    assert {draw_token(logits, REQUEST, at)[0] for at in range(200)} == {1, 3}


@pytest.mark.parametrize("logits", [[np.nan, 0], [np.inf, 0], [-np.inf, -np.inf]])
def test_logits_without_a_distribution_are_an_error(logits: list[float]) -> None:
    """The engine ends such a sequence as failed."""
    with pytest.raises(ValueError, match="the largest logit"):
        draw_token(np.array(logits, dtype=np.float32), REQUEST, 0)
