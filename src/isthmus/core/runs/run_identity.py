"""`RunIdentity`: the fields of a job that decide its result; two runs are compared field by field.

Fields that leave the result unchanged are absent: plan and parallelism, priority, placement, transport,
checkpoint interval, evaluation, the split of the batch into micro-batches. `steps` is present, because the
learning rate decays over them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from isthmus.core.base_model import FrozenModel, Name
from isthmus.core.job import MAX_DIFFERENCES, MAX_READERS, Job
from isthmus.core.model import Model

MAX_TEXT_CHARS = 512
"""Longer values are stored as their SHA-256."""

MAX_SHOWN = 4
"""Differences that an error lists; the number of the others follows."""

IDENTITY_VERSION: Literal[1] = 1

Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
FieldValue = bool | int | float | Text | None

_NEUTRAL_TRAINING = {
    "micro_batch_size", "optimizer_on_host", "evaluate_every", "evaluate_samples", "attention", "compile",
    "deterministic",
}  # fmt: skip
"""Fields of `training` that leave the result unchanged, but for rounding."""

_NEUTRAL_CONFIG = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}
"""Fields of a model's `config.json` that leave the result unchanged."""

_SHAPE_FIELDS = frozenset(
    f"model.config.{name}"
    for name in (
        "num_hidden_layers", "hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size", "head_dim",
        "num_attention_heads", "num_key_value_heads", "num_local_experts", "num_experts", "tie_word_embeddings",
        "attention_bias", "mlp_bias",
    )
) | {"model.architecture"}  # fmt: skip
"""Fields that decide names and shapes of the weights: a run with others cannot resume."""


class RunIdentity(FrozenModel):
    """The job `job` and the fields that decide its result, by dotted name, such as `training.seed`.

    Values are scalars; lists and mappings are canonical JSON. `user` submitted the job (empty: an older release made
    the claim), and `readers` are users that may resume from it.
    """

    version: Literal[1] = IDENTITY_VERSION
    job: Name
    user: Text = ""
    readers: Annotated[tuple[Name, ...], Field(max_length=MAX_READERS)] = ()
    fields: Annotated[dict[Text, FieldValue], Field(max_length=MAX_DIFFERENCES)]


class FieldDifference(FrozenModel):
    """A field of two runs, `there` and `here` (this job), with different values."""

    field: str
    there: FieldValue
    here: FieldValue

    def __str__(self) -> str:
        name = self.field.removeprefix("training.")
        return f"{name}: {_show(self.there)} there, {_show(self.here)} in this job"


def run_identity(
    job_id: str, job: Job, model: Model, contents: Mapping[str, str] | None = None, *, user: str = ""
) -> RunIdentity:
    """Return the identity of a job of `user`; `contents` adds digests of files, by dotted field name.

    The source of the weights counts only for tasks that load them.
    """
    fields: dict[str, Any] = {"task": job.task, "compute": job.compute, "model.architecture": model.architecture}
    fields |= {f"model.config.{name}": one for name, one in model.config.items() if name not in _NEUTRAL_CONFIG}
    if job.task != "pretrain":
        fields["model.source"] = job.model
    fields |= {f"data.{name}": one for name, one in job.data.model_dump().items()}
    training = job.training.model_dump(exclude=_NEUTRAL_TRAINING)
    fields |= {f"training.{name}": one for name, one in training.items()} | dict(contents or {})
    chosen = sorted(fields)[:MAX_DIFFERENCES]
    scalars = {name[:MAX_TEXT_CHARS]: _scalar(fields[name]) for name in chosen}
    return RunIdentity(job=job_id, user=user, readers=job.readers, fields=scalars)


def differences(there: RunIdentity, here: RunIdentity) -> tuple[FieldDifference, ...]:
    """Return the fields whose values differ, in the order of their names.

    A field that only one run has counts for the model's configuration, whose absent fields are None; elsewhere
    it is one that the other run's release or machine does not know.
    """
    return tuple(
        FieldDifference(field=name, there=there.fields.get(name), here=here.fields.get(name))
        for name in sorted(there.fields.keys() | here.fields.keys())
        if there.fields.get(name) != here.fields.get(name)
        and (name.startswith("model.config.") or (name in there.fields and name in here.fields))
    )


def shape_differences(found: tuple[FieldDifference, ...]) -> tuple[FieldDifference, ...]:
    """Return those differences that give the weights other names or shapes.

    An absent field has a default that may equal the other value; the worker compares the tensors themselves.
    """
    return tuple(one for one in found if one.field in _SHAPE_FIELDS and None not in (one.there, one.here))


def list_differences(found: tuple[FieldDifference, ...]) -> str:
    """Return the differences as one text; at most `MAX_SHOWN` of them in full, training fields first."""
    first = sorted(found, key=lambda one: not one.field.startswith("training."))
    shown = "; ".join(map(str, first[:MAX_SHOWN]))
    return shown + (f"; and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else "")


def _scalar(value: Any) -> FieldValue:
    """Return a value as a scalar of bounded size."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**63 else _digest(str(value))
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
    return text if len(text) <= MAX_TEXT_CHARS else _digest(text)


def _digest(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _show(value: FieldValue) -> str:
    """Return a value for a message: short, and without control characters."""
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 80 else f"{text[:77]}..."
