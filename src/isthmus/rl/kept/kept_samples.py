"""`KeptSamples`: trained samples with their tokens, for audits after a run, as files beside the ledger.

A file has the samples of one training step of which some claim a version whose weights a checkpoint keeps. Other steps
are not kept: no audit could recompute them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from isthmus.core.base_model import FrozenModel, NonNegativeInt
from isthmus.core.bounded_file import read_within
from isthmus.core.errors import FileError, InputError, NotFoundError, UnavailableError
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.rl.ledger.ledger_records import SampleRecord, TokenRange
from isthmus.rl.ledger.rollout_events import SampleKey

MAX_STEP_BYTES = 256 << 20
"""Largest file of a step: samples beyond it are counted, not kept."""
MAX_KEPT_BYTES = 1 << 30
"""Most bytes of all files of a run: those of the oldest steps go first."""
_FOLDER = "trained"
_TOKEN_BYTES = 32
"""Most bytes of a token and its log-probability in a file, in round numbers."""

_Tokens = tuple[NonNegativeInt, ...]


class KeptRange(FrozenModel):
    """A range of tokens, as `TokenRange`; `version` is the training step after which its weights were."""

    start: NonNegativeInt
    end: NonNegativeInt
    version: NonNegativeInt
    engine: Annotated[str, Field(max_length=512)]
    owner: Annotated[str, Field(max_length=512)]


class KeptSample(FrozenModel):
    """A trained sample; without tokens where the weights of one of its versions are in no checkpoint."""

    key: tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt]
    ranges: tuple[KeptRange, ...]
    prompt_tokens: _Tokens = ()
    tokens: _Tokens = ()
    log_probabilities: tuple[Annotated[float, Field(allow_inf_nan=False)], ...] = ()

    @property
    def versions(self) -> set[int]:
        """Return the versions that its sampled tokens claim."""
        return {one.version for one in self.record.ranges if one.is_sampled}

    @property
    def record(self) -> SampleRecord:
        """Return it as the ledger has it, with versions as training steps."""
        return SampleRecord(key=SampleKey(*self.key), ranges=[TokenRange(**one.model_dump()) for one in self.ranges])


class KeptStep(FrozenModel):
    """The trained samples of a step; `names` are those of the versions that checkpoints keep, "" for one made twice."""

    format: Literal[1] = 1
    step: NonNegativeInt
    names: dict[NonNegativeInt, Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]]
    samples: Annotated[tuple[KeptSample, ...], Field(max_length=1_000_000)]
    num_left_out: NonNegativeInt = 0


class KeptSamples:
    """The files of one run, in a folder of their own below `ledger_folder`."""

    def __init__(
        self, ledger_folder: Path, max_step_bytes: int = MAX_STEP_BYTES, max_kept_bytes: int = MAX_KEPT_BYTES
    ) -> None:
        self._folder = ledger_folder / _FOLDER
        self._max_step_bytes, self._max_kept_bytes = max_step_bytes, max_kept_bytes

    def write(self, step: int, names: dict[int, str], samples: Sequence[KeptSample]) -> None:
        """Keep the samples of a step, in place of those that were kept of it; raises `UnavailableError`."""
        kept, size, left_out = list[KeptSample](), 0, 0
        for one in samples:
            size += _TOKEN_BYTES * (len(one.prompt_tokens) + len(one.tokens)) + 256 * (1 + len(one.ranges))
            if size <= self._max_step_bytes:
                kept.append(one)
            else:
                left_out += 1
        claimed = set[int]().union(*(one.versions for one in kept))
        content = KeptStep(
            step=step, names={version: name for version, name in names.items() if version in claimed},
            samples=tuple(kept), num_left_out=left_out,
        )  # fmt: skip
        try:
            write_atomically(self._file(step), content.model_dump_json())
            self._drop_oldest()
        except OSError as error:
            raise UnavailableError(f"cannot write {self._folder}: {error.strerror}") from error

    def read(self, step: int) -> KeptStep:
        """Return the samples of a step.

        Raises `NotFoundError` for a step of which none are kept, `InputError` for a file that is damaged.
        """
        file = self._file(step)
        try:
            found = KeptStep.model_validate_json(read_within(file, self._max_step_bytes + (1 << 20)))
            if found.step != step:
                raise InputError(f"{file} is of step {found.step}", hint="restore it, or remove it")
            for one in found.samples:
                _check(one, file)
        except FileNotFoundError as error:
            kept = ", ".join(map(str, self.steps())) or "none"
            raise NotFoundError(f"the tokens of step {step} are not kept", hint=f"steps that are: {kept}") from error
        except (OSError, ValidationError, RecursionError, FileError) as error:
            cause = str(error).partition("\n")[0]
            raise InputError(f"{file} cannot be read: {cause}", hint="restore it, or remove it") from error
        return found

    def steps(self) -> list[int]:
        """Return the steps of which samples are kept."""
        return sorted(
            int(one.stem.removeprefix("step-"))
            for one in self._folder.glob("step-*.json")
            if one.stem.removeprefix("step-").isdecimal()
        )

    def _file(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}.json"

    def _drop_oldest(self) -> None:
        """Remove the files of the oldest steps until all together are small enough."""
        sizes = {step: self._file(step).stat().st_size for step in self.steps()}
        total = sum(sizes.values())
        for step in list(sizes)[:-1]:
            if total <= self._max_kept_bytes:
                break
            self._file(step).unlink(missing_ok=True)
            total -= sizes[step]


def _check(one: KeptSample, file: Path) -> None:
    """Raise `InputError` unless ranges follow one another and cover the tokens, where these are kept."""
    end = 0
    for piece in one.ranges:
        if piece.start != end or piece.end <= piece.start:
            raise InputError(f"{file}: sample {one.key} has no tokens from {end} on", hint="restore it, or remove it")
        end = piece.end
    if len(one.tokens) != len(one.log_probabilities) or (one.tokens and len(one.tokens) != end):
        counts = f"{len(one.tokens)} tokens, {len(one.log_probabilities)} log-probabilities and ranges up to {end}"
        raise InputError(f"{file}: sample {one.key} has {counts}", hint="restore it, or remove it")
