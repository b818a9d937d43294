"""`write_first_files`: job, pool and site files from commented templates, complete and never overwriting."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from isthmus.core.chip import chip_catalogue
from isthmus.core.errors import ConflictError, InputError
from isthmus.core.files.validation_errors import chip_hint
from isthmus.core.job import Job
from isthmus.core.model import load_model, require_trainable
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.pool import Pool
from isthmus.core.process.state_folder_lock import unwritable_folder_error

STARTER_MODEL = "model/config.json"
"""Where the small model of a job without one of its own is written."""
_CLUSTER = re.compile(r"([^@=]+)(?:@([^@=]+))?=([^:]+):([1-9][0-9]{0,5})x([1-9][0-9]{0,3})")
_KINDS: dict[str, type[BaseModel]] = {
    "job.yaml": Job, "pool.yaml": Pool, "site.yaml": Pool, "policy.yaml": OwnerPolicy,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FirstCluster:
    """A cluster with one node group, as `NAME[@OWNER]=CHIP:NODESxCHIPS`."""

    name: str
    owner: str
    chip: str
    nodes: int
    chips_per_node: int

    @classmethod
    def parse(cls, text: str) -> FirstCluster:
        """Return the cluster that `text` describes; raise `InputError` for another form or an unknown chip."""
        match = _CLUSTER.fullmatch(text.strip())
        if match is None:
            hint = "give NAME[@OWNER]=CHIP:NODESxCHIPS_PER_NODE, for example hangzhou@zhejiang=H20:2x8"
            raise InputError(f"'{text[:80]}' is not a cluster", hint=hint)
        name, owner, chip, nodes, chips = match.groups()
        if chip not in chip_catalogue():
            raise InputError(f"unknown chip '{chip[:80]}'", hint=chip_hint(chip, chip_catalogue()))
        return cls(name=name, owner=owner or name, chip=chip, nodes=int(nodes), chips_per_node=int(chips))


@dataclass(frozen=True, kw_only=True)
class FirstAnswers:
    """What `isthmus init` asks."""

    name: str
    # A folder or config.json (None: a small model is written).
    model: Path | None = None
    # Empty: the Python files of this machine's standard library.
    data: tuple[str, ...] = ()
    task: str = "pretrain"
    steps: int = 100
    clusters: tuple[FirstCluster, ...]
    bandwidth_gbps: float = 10.0
    round_trip_ms: float = 20.0
    policy: str = "manual"


def write_first_files(folder: Path, answers: FirstAnswers) -> tuple[Path, ...]:
    """Write the files to `folder` and return them; nothing is written if one exists or an answer is invalid.

    Raises `ConflictError` for existing files, `InputError` or `ModelError` for an invalid answer.
    """
    texts = _render(answers)
    existing = [name for name in texts if (folder / name).exists()]
    if existing:
        raise ConflictError(
            f"{folder} already has {', '.join(existing)}", hint="choose another folder; init never overwrites a file"
        )
    written: list[Path] = []
    try:
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with (folder / name).open("x", encoding="utf-8") as file:
                written.append(folder / name)
                file.write(text)
    except OSError as error:
        for path in written:
            with contextlib.suppress(OSError):
                path.unlink()
        raise unwritable_folder_error(folder, error) from error
    return tuple(written)


def _render(answers: FirstAnswers) -> dict[str, str]:
    """Return the text of each file; every file is valid."""
    clusters = [_cluster_text(one) for one in answers.clusters]
    texts = {
        "job.yaml": _fill("job.yaml", _job_fields(answers)),
        "pool.yaml": _fill("pool.yaml", {"clusters": "".join(clusters), "links": _links_text(answers)}),
        "site.yaml": _fill("site.yaml", {"cluster": clusters[0]}),
        "policy.yaml": _fill("policy.yaml", {}),
    }
    for name, text in texts.items():
        _check(name, text)
    if answers.model is None:
        starter = resources.files("isthmus.cli.demo") / "demo_files" / "config.json"
        texts[STARTER_MODEL] = starter.read_text(encoding="utf-8")
    return texts


def _job_fields(answers: FirstAnswers) -> dict[str, Any]:
    if answers.task != "pretrain" and answers.model is None:
        raise InputError(f"the task {answers.task} needs a model with weights", hint="give its folder with --model")
    if answers.task == "finetune" and not answers.data:
        raise InputError("the task finetune needs chats", hint="give JSON Lines with `messages` by --data")
    given = _given_model(answers.model) if answers.model is not None else {}
    return {
        "name": answers.name,
        "model": "model",
        "task": answers.task,
        "data": list(answers.data) or [f"{sysconfig.get_path('stdlib')}/*.py"],
        "format": "chat" if answers.task == "finetune" else "auto",
        "tokenizer": "model",
        "steps": answers.steps,
        "sequence_length": 256,
        "global_batch_size": 8,
        "warmup_steps": answers.steps // 20,
        "precision": "fp32",
        "evaluate_every": max(1, answers.steps // 5),
        "checkpoint_every": max(1, answers.steps // 2),
        "policy": answers.policy,
        "first_cluster": answers.clusters[0].name,
    } | given


def _given_model(path: Path) -> dict[str, Any]:
    """Return the fields that follow from the user's model; raise `ModelError` if it cannot be trained."""
    model = load_model(str(path))
    require_trainable(model)
    positions = model.config.get("max_position_embeddings")
    return {
        "model": str(path.resolve()),
        "sequence_length": min(2048, positions) if isinstance(positions, int) and positions > 0 else 2048,
        "precision": "bf16",
    }


def _cluster_text(one: FirstCluster) -> str:
    return _fill("cluster.yaml", vars(one)).rstrip("\n")


def _links_text(answers: FirstAnswers) -> str:
    pairs = list(itertools.combinations([one.name for one in answers.clusters], 2))
    rates = f"bandwidth_gbps: {answers.bandwidth_gbps!r}, round_trip_ms: {answers.round_trip_ms!r}"
    lines = [f"\n  - {{between: {json.dumps(pair)}, {rates}}}" for pair in pairs]
    return "".join(lines) or " []"


def _fill(template: str, fields: dict[str, Any]) -> str:
    """Return a template with its fields as JSON values, which YAML reads as such; texts of files stay as they are."""
    text = (resources.files("isthmus.cli.setup") / "templates" / template).read_text(encoding="utf-8")
    as_is = ("clusters", "links", "cluster")
    return Template(text).substitute(
        {key: value if key in as_is else json.dumps(value, ensure_ascii=False) for key, value in fields.items()}
    )


def _check(name: str, text: str) -> None:
    """Raise `InputError` if a file is not valid, with the answer that makes it so."""
    try:
        _KINDS[name].model_validate(yaml.safe_load(text))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or name
        reason = first["msg"].removeprefix("Value error, ")
        message = f"{name}: {field}: {reason}, not {str(first['input'])[:80]!r}"
        raise InputError(message, hint="correct the answer; nothing is written") from error


def default_name(folder: Path) -> str:
    """Return a job name made from the folder's."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-._")[:63]
    return name or "my-job"


def parse_clusters(texts: Sequence[str]) -> tuple[FirstCluster, ...]:
    """Return the clusters of all `texts`, each one or several separated by commas."""
    return tuple(FirstCluster.parse(one) for text in texts for one in text.split(",") if one.strip())
