"""Rules of the fields of a job with `task: rl`: what cannot be is refused with the nearest valid value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from isthmus.core.errors import DataError
from isthmus.core.job import Job
from isthmus.core.job_parts.rl_job import RlConfig
from isthmus.core.runs.check_job import job_problems
from isthmus.data import open_prompts

TRAINING = {"steps": 1, "sequence_length": 16, "global_batch_size": 16}
SIZES: dict[str, Any] = {"max_prompt_tokens": 8, "max_response_tokens": 8, "reward": {"exact": True}}


def test_an_algorithm_sets_what_the_job_leaves_out() -> None:
    """A field that is given counts."""
    grpo, dapo = RlConfig(algorithm="grpo", **SIZES), RlConfig(algorithm="dapo", clip_dual=4.0, **SIZES)
    assert (grpo.clip, grpo.aggregate, grpo.filter_groups, grpo.clip_dual) == ((0.2, 0.2), "sequence", False, None)
    assert (dapo.clip, dapo.aggregate, dapo.filter_groups, dapo.clip_dual) == ((0.2, 0.28), "token", True, 4.0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"group": 1}, "nearest valid value: 2"),
        ({"clip": (0.0, 0.28)}, "nearest valid value: 0.01"),
        ({"clip": (0.2, 1.0)}, "nearest valid value: 0.99"),
        ({"kl": -0.1}, "greater than or equal to 0"),
        ({"audit": 1.1}, "less than or equal to 1"),
        ({"overlong": {"buffer": 9}}, "nearest valid value: 8"),
        ({"correction": {"truncate": (2.0, 1.0)}}, "does not rise"),
        ({"reward": {}}, "one of exact, function and url"),
        ({"reward": {"exact": True, "url": "http://a/b"}}, "one of exact, function and url"),
        ({"reward": {"function": "rewards.txt:score"}}, "FILE.py:NAME"),
    ],
)
def test_what_cannot_be_is_refused(changed: dict[str, Any], message: str) -> None:
    """Each with the nearest valid value, or the form."""
    with pytest.raises(ValidationError, match=message):
        RlConfig(**(SIZES | changed))


def job(folder: Path, line: str = '{"prompt": "1+1=", "answer": "2"}', **changed: Any) -> Job:
    """Return a job on one line of prompts."""
    (folder / "prompts.jsonl").write_text(line)
    fields = {
        "name": "j", "task": "rl", "model": "m", "output": "o", "rl": SIZES,
        "data": {"paths": [str(folder / "prompts.jsonl")], "format": "prompts", "tokenizer": "bytes"},
        "training": TRAINING,
    }  # fmt: skip
    return Job.model_validate(fields | changed)


@pytest.mark.parametrize(
    ("field", "changed", "hint"),
    [
        (
            "training.global_batch_size",
            {"training": TRAINING | {"global_batch_size": 12}},
            "16",
        ),
        ("training.sequence_length", {"training": TRAINING | {"sequence_length": 15}}, "16"),
        ("data.format", {"data": {"paths": ["p"], "format": "jsonl"}}, "prompts"),
        ("placement.rollouts", {"placement": {"rollouts": ["b", "b"]}}, "b"),
        ("placement.least_rollouts", {"placement": {"rollouts": ["b", "c"], "least_rollouts": 3}}, "2"),
        ("placement.train", {"task": "pretrain", "rl": None, "placement": {"train": ["b"]}}, "placement.clusters"),
        ("compute", {"compute": "virtual"}, "real"),
    ],
)
def test_fields_that_do_not_go_together_are_named(
    tmp_path: Path, field: str, changed: dict[str, Any], hint: str
) -> None:
    """With the nearest valid value."""
    assert not list(job_problems(job(tmp_path)))
    found = {one.field: one.hint for one in job_problems(job(tmp_path, **changed))}
    assert hint in found[field]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "1+1="}', "'answer' is missing"),
        ('{"prompt": 3, "answer": "2"}', "'prompt' is 3"),
        ('{"prompt": "1000000+1000000=", "answer": "2"}', "has 16 tokens"),
        ("", "no "),
    ],
)
def test_prompts_that_cannot_be_used_are_named(tmp_path: Path, line: str, message: str) -> None:
    """With file and line."""
    with pytest.raises(DataError, match=message):
        open_prompts(job(tmp_path, line))


def test_prompts_are_read_by_number_and_responses_end_without_the_end_token(tmp_path: Path) -> None:
    """Epochs repeat the prompts in another order."""
    prompts = open_prompts(job(tmp_path, "\n".join(f'{{"prompt": "{n}=", "answer": "{n}"}}' for n in range(9))))
    first = [prompts.prompt(n).text for n in range(8)]
    assert sorted(first) == sorted({prompts.prompt(n).text for n in range(8, 16)})
    assert prompts.text_of([52, 50, prompts.end_id]) == "42"
