"""`RlConfig`: what a job with `task: rl` says of its algorithm, its samples and its rewards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, field_validator, model_validator

from isthmus.core.base_model import FrozenModel, NonNegativeFloat, NonNegativeInt, PathName, PositiveFloat, PositiveInt

MAX_GROUP = 4096
"""Most samples of a prompt."""
MAX_STALENESS = 64
"""Largest bound on the versions between the one that sampled a token and the one that is trained."""
MAX_REWARDS = 16
"""Most rewards of a weighted sum."""
MAX_REWARD_WORKERS = 64
"""Most rewards that are computed at a time."""
MAX_RESPONSE_TOKENS = 1 << 20
MAX_URL_CHARS = 1024
MAX_LENGTHS = 4096
"""Most measured lengths of responses."""
MAX_TURNS = 1024
"""Most turns of the model in a response."""
MAX_STOPS = 16
MAX_STOP_CHARS = 64
MAX_KL = 100.0
"""Largest factor of the penalty for leaving the first weights."""

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
ServiceUrl = Annotated[str, Field(pattern=r"^https?://[^\s@?#]+$", max_length=MAX_URL_CHARS)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
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
    url: ServiceUrl | None = None
    timeout_s: PositiveFloat = 10.0
    weight: float = 1.0

    @model_validator(mode="after")
    def _check_kind(self) -> RewardConfig:
        given = [name for name in ("exact", "function", "url") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"a reward has one of exact, function and url; it has {' and '.join(given) or 'none'}")
        return self


class EnvironmentConfig(FrozenModel):
    """What answers the turns of a response: a function of the user's, or an HTTP service.

    A turn of the model ends with the end token or with one of the texts `stop`, each one token. Then a function
    `NAME(prompt, turns, answer)` of the user's file is called, in a process of its own, with all turns so far
    (`{"by": "model" | "environment", "text", "tokens"}`). It returns what the model sees next, as text or as a list of
    token numbers, or None: the response has ended. A service gets `{"prompt", "turns", "answer"}` by POST and answers
    `{"observation": ...}`. It keeps nothing between calls, so that samples survive restarts.

    A response has at most `max_turns` turns of the model, and `max_response_tokens` tokens, observations included. An
    observation has at most `max_observation_tokens`; it is not trained on. A call that raises, takes longer than
    `timeout_s`, or answers what cannot be, is made again, and then the sample fails. Rewards get the last turn of the
    model as response (`scores: last_turn`), or the text of all turns (`transcript`).
    """

    function: FunctionName | None = None
    url: ServiceUrl | None = None
    timeout_s: PositiveFloat = 10.0
    max_turns: Annotated[PositiveInt, Field(le=MAX_TURNS)] = 8
    max_observation_tokens: Annotated[PositiveInt, Field(le=MAX_RESPONSE_TOKENS)] = 256
    stop: Annotated[tuple[StopText, ...], Field(max_length=MAX_STOPS)] = ()
    scores: Literal["last_turn", "transcript"] = "last_turn"

    @model_validator(mode="after")
    def _check_kind(self) -> EnvironmentConfig:
        given = [name for name in ("function", "url") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"an environment has a function or a url; it has {' and '.join(given) or 'none'}")
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

    Old log-probabilities are those of the engine that sampled (`old: rollout`), or those of a further forward pass of
    the training plan when the step begins (`recomputed`). A token is trained on at most
    `max_staleness` versions after the one that sampled it. Under new weights unfinished samples go on (`keep`), go on
    with a cache computed again (`refill`), or begin again (`abort`). `reward` is one reward or a list,
    whose weighted sum counts. Of up to `reward_workers` samples at a time functions and services are called, each
    function in as many processes. With an `environment` a response has several turns.

    `audit` is the share of the samples of other clusters that the training cluster decodes again at the versions that
    they claim. Tokens, log-probabilities or weights that were forged end the decoding of their owner; its samples that
    have not been trained on begin again elsewhere.

    `lengths` are measured lengths of responses, in tokens, such as those of an earlier run: the planner counts time and
    memory of decoding by them. Without any it expects a mean of a quarter of `max_response_tokens`.

    `kl` above 0 adds that many times the penalty k3 to the loss of each token: it keeps the policy near the model that
    training began with, of which each chip keeps a frozen copy beside its weights.

    With `replay_routing` engines report which experts each token took, and training takes the same ones, weighted by
    its own router; so do recomputed old log-probabilities. The model needs experts.
    """

    algorithm: Literal["grpo", "dapo"] = "dapo"
    group: Annotated[int, Field(ge=1, le=MAX_GROUP)] = 8
    max_prompt_tokens: Annotated[PositiveInt, Field(le=MAX_RESPONSE_TOKENS)]
    max_response_tokens: Annotated[PositiveInt, Field(le=MAX_RESPONSE_TOKENS)]
    temperature: PositiveFloat = 1.0
    clip: tuple[ClipBound, ClipBound] = (0.2, 0.28)
    clip_dual: Annotated[float, Field(gt=1)] | None = None
    aggregate: Literal["token", "sequence", "constant"] = "token"
    kl: Annotated[NonNegativeFloat, Field(le=MAX_KL)] = 0.0
    filter_groups: bool = True
    overlong: OverlongConfig | None = None
    correction: CorrectionConfig | None = None
    old: Literal["rollout", "recomputed"] = "rollout"
    max_staleness: Annotated[NonNegativeInt, Field(le=MAX_STALENESS)] = 0
    on_update: Literal["keep", "refill", "abort"] = "keep"
    replay_routing: bool = False
    audit: Annotated[float, Field(ge=0, le=1)] = 0.0
    lengths: Annotated[tuple[PositiveInt, ...], Field(max_length=MAX_LENGTHS)] = ()
    reward: RewardConfig | Annotated[tuple[RewardConfig, ...], Field(min_length=1, max_length=MAX_REWARDS)]
    environment: EnvironmentConfig | None = None
    reward_workers: Annotated[PositiveInt, Field(le=MAX_REWARD_WORKERS)] = 4

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
    def function_files(self) -> tuple[str, ...]:
        """The files of the functions of rewards, then of the environment."""
        named = (*(one.function for one in self.rewards), self.environment.function if self.environment else None)
        return tuple(one.rpartition(":")[0] for one in named if one is not None)

    def with_function_files(self, files: tuple[str, ...]) -> RlConfig:
        """Return it with the files of `function_files` replaced, in that order."""
        left = iter(files)
        changed = tuple(_moved(one, left) for one in self.rewards)
        return self.model_copy(
            update={
                "reward": changed if isinstance(self.reward, tuple) else changed[0],
                "environment": None if self.environment is None else _moved(self.environment, left),
            }
        )


Caller = TypeVar("Caller", RewardConfig, EnvironmentConfig)


def _moved(one: Caller, files: Iterator[str]) -> Caller:
    """Return what calls a function with the next file in place of its own."""
    if one.function is None:
        return one
    return one.model_copy(update={"function": f"{next(files)}:{one.function.rpartition(':')[2]}"})
