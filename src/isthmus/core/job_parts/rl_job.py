"""`RlConfig`: what a job with `task: rl` says of its algorithm, its samples and its rewards."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from isthmus.core.base_model import FrozenModel, NonNegativeFloat, NonNegativeInt, PathName, PositiveFloat, PositiveInt

MAX_GROUP = 4096
"""Most samples of a prompt."""
MAX_STALENESS = 64
"""Largest bound on the versions between the one that sampled a token and the one that is trained."""
MAX_REWARDS = 16
"""Most rewards of a weighted sum."""
MAX_RESPONSE_TOKENS = 1 << 20
MAX_URL_CHARS = 1024
MAX_LENGTHS = 4096
"""Most measured lengths of responses."""

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"clip": (0.2, 0.2), "aggregate": "sequence", "filter_groups": False},
    "dapo": {"clip": (0.2, 0.28), "clip_dual": 3.0, "aggregate": "token", "filter_groups": True},
}
"""What an algorithm sets of the fields that a job leaves out."""


def _check_clip(value: float) -> float:
    if not 0 < value < 1:
        raise ValueError(f"clip {value} is not inside (0, 1); nearest valid value: {0.01 if value <= 0 else 0.99}")
    return value


def _check_function(value: str) -> str:
    path, colon, name = value.rpartition(":")
    if not (colon and path.endswith(".py") and name.isidentifier()):
        raise ValueError(f"'{value}' names no function; write FILE.py:NAME, such as rewards.py:score")
    return value


ClipBound = Annotated[float, AfterValidator(_check_clip)]
FunctionName = Annotated[PathName, AfterValidator(_check_function)]


class OverlongConfig(FrozenModel):
    """Soft punishment of long responses (DAPO): it grows to `penalty` over the last `buffer` tokens."""

    buffer: PositiveInt
    penalty: NonNegativeFloat = 1.0


class CorrectionConfig(FrozenModel):
    """Correction for the engine's policy being another one than the trainer's.

    One bound truncates the ratio of a token, or of the whole response (`level`); a pair (low, high) masks what is
    outside.
    """

    level: Literal["token", "sequence"] = "token"
    truncate: PositiveFloat | tuple[NonNegativeFloat, PositiveFloat] = 2.0

    @model_validator(mode="after")
    def _check(self) -> CorrectionConfig:
        if isinstance(self.truncate, tuple) and self.truncate[0] >= self.truncate[1]:
            low, high = self.truncate
            raise ValueError(f"truncate [{low}, {high}] does not rise; nearest valid value: [{high / 2}, {high}]")
        return self


class RewardConfig(FrozenModel):
    """One reward: `exact` (1 if the response is the answer, else 0), a function of the user's, or an HTTP service.

    A function `NAME(prompt, response, answer)` of the user's file returns a number; it runs in a process of its own. A
    service gets `{"prompt", "response", "answer"}` by POST and answers `{"reward": number}`. A call that takes longer
    than `timeout_s` has failed. `weight` multiplies the reward in a sum.
    """

    exact: Literal[True] | None = None
    function: FunctionName | None = None
    url: Annotated[str, Field(pattern=r"^https?://[^\s@?#]+$", max_length=MAX_URL_CHARS)] | None = None
    timeout_s: PositiveFloat = 10.0
    weight: float = 1.0

    @model_validator(mode="after")
    def _check_kind(self) -> RewardConfig:
        given = [name for name in ("exact", "function", "url") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"a reward has one of exact, function and url; it has {' and '.join(given) or 'none'}")
        return self


class RlConfig(FrozenModel):
    """Reinforcement learning of a job with `task: rl`.

    `algorithm` sets the fields that are left out: `grpo` clips at 0.2 and takes means by sequence; `dapo` clips at 0.2
    and 0.28, clips twice at 3.0, takes means by token and drops groups whose rewards are all equal (`filter_groups`);
    another prompt takes the place of a dropped one.

    Each prompt has `group` samples, each of at most `max_response_tokens`, drawn at `temperature`. Prompts longer than
    `max_prompt_tokens` are refused. `aggregate` says how losses of tokens become one: the mean over all tokens of the
    step (`token`), the mean over responses of each one's mean (`sequence`), or the sum over samples and positions
    divided by their number (`constant`).

    Old log-probabilities are those of the engine that sampled (`old: rollout`). A token is trained on at most
    `max_staleness` versions after the one that sampled it. Under new weights unfinished samples go on (`keep`), go on
    with a cache computed again (`refill`), or begin again (`abort`). `reward` is one reward or a list,
    whose weighted sum counts.

    `audit` is the share of the samples of other clusters that the training cluster decodes again at the versions that
    they claim. Tokens, log-probabilities or weights that were forged end the decoding of their owner; its samples that
    have not been trained on begin again elsewhere.

    `lengths` are measured lengths of responses, in tokens, such as those of an earlier run: the planner counts time and
    memory of decoding by them. Without any it expects a mean of a quarter of `max_response_tokens`.

    `kl` above 0 and `replay_routing` are reserved: there is no reference model and no replay of routing yet.
    """

    algorithm: Literal["grpo", "dapo"] = "dapo"
    group: Annotated[int, Field(ge=1, le=MAX_GROUP)] = 8
    max_prompt_tokens: Annotated[PositiveInt, Field(le=MAX_RESPONSE_TOKENS)]
    max_response_tokens: Annotated[PositiveInt, Field(le=MAX_RESPONSE_TOKENS)]
    temperature: PositiveFloat = 1.0
    clip: tuple[ClipBound, ClipBound] = (0.2, 0.28)
    clip_dual: Annotated[float, Field(gt=1)] | None = None
    aggregate: Literal["token", "sequence", "constant"] = "token"
    kl: NonNegativeFloat = 0.0
    filter_groups: bool = True
    overlong: OverlongConfig | None = None
    correction: CorrectionConfig | None = None
    old: Literal["rollout"] = "rollout"
    max_staleness: Annotated[NonNegativeInt, Field(le=MAX_STALENESS)] = 0
    on_update: Literal["keep", "refill", "abort"] = "keep"
    replay_routing: Literal[False] = False
    audit: Annotated[float, Field(ge=0, le=1)] = 0.0
    lengths: Annotated[tuple[PositiveInt, ...], Field(max_length=MAX_LENGTHS)] = ()
    reward: RewardConfig | Annotated[tuple[RewardConfig, ...], Field(min_length=1, max_length=MAX_REWARDS)]

    @model_validator(mode="before")
    @classmethod
    def _fill_algorithm(cls, data: Any) -> Any:
        """Set the fields that the algorithm decides and the job leaves out."""
        if not isinstance(data, dict):
            return data
        return {**ALGORITHMS.get(str(data.get("algorithm", "dapo")), {}), **data}

    @field_validator("group")
    @classmethod
    def _check_group(cls, group: int) -> int:
        if group < 2:
            raise ValueError("a group of 1 has no mean to compare with; nearest valid value: 2")
        return group

    @field_validator("kl")
    @classmethod
    def _check_kl(cls, kl: float) -> float:
        if kl > 0:
            raise ValueError(f"kl {kl} needs a reference model, which no run has yet; nearest valid value: 0.0")
        return kl

    @model_validator(mode="after")
    def _check_overlong(self) -> RlConfig:
        if self.overlong is not None and self.overlong.buffer > self.max_response_tokens:
            raise ValueError(
                f"overlong.buffer {self.overlong.buffer} exceeds max_response_tokens; nearest valid value: "
                f"{self.max_response_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _check_lengths(self) -> RlConfig:
        if self.lengths and max(self.lengths) > self.max_response_tokens:
            raise ValueError(
                f"lengths has {max(self.lengths)} tokens, max_response_tokens is {self.max_response_tokens}; nearest "
                f"valid value: {self.max_response_tokens}"
            )
        return self

    @property
    def rewards(self) -> tuple[RewardConfig, ...]:
        """The rewards of the weighted sum."""
        return self.reward if isinstance(self.reward, tuple) else (self.reward,)

    @property
    def reward_files(self) -> tuple[str, ...]:
        """The files of reward functions."""
        return tuple(one.function.rpartition(":")[0] for one in self.rewards if one.function is not None)

    def with_reward_files(self, files: tuple[str, ...]) -> RlConfig:
        """Return it with the files of `reward_files` replaced, in that order."""
        left = iter(files)
        changed = tuple(
            one if one.function is None
            else one.model_copy(update={"function": f"{next(left)}:{one.function.rpartition(':')[2]}"})
            for one in self.rewards
        )  # fmt: skip
        return self.model_copy(update={"reward": changed if isinstance(self.reward, tuple) else changed[0]})
