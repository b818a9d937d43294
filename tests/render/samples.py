"""Blueprints and images of the tests of rendering."""

from __future__ import annotations

import dataclasses
from typing import Any

from isthmus.core.job import DataConfig, Job, TrainingConfig
from isthmus.render import Blueprint, Image, ImageFacts
from isthmus.render.wide_area_path import WideAreaPath

DIGEST = "sha256:" + "a" * 64
RESERVED = WideAreaPath(kind="reserved", round_trip_s=0.04, bandwidth_gbps=10.0)
BEST_EFFORT = WideAreaPath(kind="best-effort", round_trip_s=0.04, bandwidth_gbps=1.0)


def make_job(runtime: dict[str, Any] | None = None, **training: Any) -> Job:
    return Job(
        name="job",
        model="/models/llama",
        data=DataConfig(paths=("/data/a", "/data/b")),
        training=TrainingConfig(**{"steps": 10, **training}),
        output="/out/job",
        **({"runtime": runtime} if runtime else {}),
    )


def make_blueprint(runtime: dict[str, Any] | None = None, **changes: Any) -> Blueprint:
    made = Blueprint(
        job=changes.pop("job", None) or make_job(runtime),
        job_id="0123",
        cluster="hangzhou",
        node_group="h20",
        chip="H20",
        num_chips=4,
        ranks=(0, 1, 2, 3),
        world_size=8,
        collective_library="nccl",
        driver="535.104.05",
        cpus=16.0,
        memory_bytes=64 << 30,
    )
    return dataclasses.replace(made, **changes)


def make_image(
    name: str = "isthmus", version: str = "1", *, labels: dict[str, str] | None = None, **facts: Any
) -> Image:
    facts = {"libraries": {"isthmus": {}, "nccl": {}}, **facts}
    return Image(name=name, version=version, digest=DIGEST, labels=labels or {}, facts=ImageFacts.model_validate(facts))
