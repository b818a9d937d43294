"""FlagPerf's tables of NVIDIA chips, read from a copy of its repository; none of its data is kept here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._models import even_plan, llama
from benchmarks._public_run import GIB, PublicRun, number, public_cluster, public_model, table_rows
from isthmus.core.plan_parts.kernel_choice import KernelChoice
from isthmus.plan.profile.layer_profile import ModelProfile

REPOSITORY = "github.com/FlagOpen/FlagPerf"


@dataclass(frozen=True, kw_only=True)
class Case:
    """The defaults of one case, from its README and scripts: what a row does not state."""

    config: str
    stack: str
    gbps: float
    sequence_length: int
    local_batch: int = 1
    global_batch: int | None = None
    steps: int = 1
    sp: bool = False
    zero: int = 1
    tied: bool = False
    recompute: str = "none"
    dropout: bool = False


CASES = {
    "llama3_8B-megatron": Case(
        config="llama-3.1-8b", stack="megatron", gbps=200, sequence_length=8192, global_batch=512, sp=True, tied=True,
        recompute="selective", dropout=True,
    ),
    "llama3_70B-megatron": Case(
        config="llama-3.1-70b", stack="megatron", gbps=400, sequence_length=8192, global_batch=512, sp=True, tied=True,
        recompute="selective", dropout=True,
    ),
    "llama2_70B-megatron": Case(
        config="llama-2-70b", stack="megatron-local", gbps=200, sequence_length=4096, steps=44, sp=True
    ),
    "mixtral_8x7B-megatron": Case(
        config="mixtral-8x7b", stack="megatron", gbps=400, sequence_length=4096, local_batch=3, global_batch=1200,
        sp=True, recompute="selective", dropout=True,
    ),
    "aquila2_7b-flagscale": Case(config="aquila2-7b", stack="megatron-local", gbps=200, sequence_length=2048, steps=9),
    "aquila2_7b_finetune-flagscale": Case(
        config="aquila2-7b", stack="megatron-local", gbps=200, sequence_length=2048, steps=4
    ),
    "llama2_7b-deepspeed": Case(config="llama-2-7b", stack="deepspeed", gbps=200, sequence_length=4096, zero=3),
}  # fmt: skip
"""Cases that state chips, degrees and throughput; networks are those of a node's adapter, per chip."""

_TOKENS = "token/p/s"


def read_flagperf(folder: Path) -> list[PublicRun]:
    """Return the runs of `training/nvidia`; raise `FileNotFoundError` where they are not there."""
    found: list[PublicRun] = []
    for name, case in CASES.items():
        text = (folder / "training" / "nvidia" / name / "README.md").read_text(encoding="utf-8")
        rows = [row for table in table_rows(text) for row in table if any(_TOKENS in column for column in row)]
        found += [run for index, row in enumerate(rows) if (run := _run(f"{name} {index}", case, text, row))]
    return found


def _run(name: str, case: Case, text: str, row: dict[str, str]) -> PublicRun | None:
    told = {key.strip(): value for key, value in row.items()}
    chip = re.match(r"(A100|A800|H100|H800)", told["配置"])
    shape = re.search(r"（(\d+)x(\d+)）", told["配置"])
    if chip is None or shape is None:
        return None
    nodes, each = int(shape[1]), int(shape[2])
    named = told.get("parallel", "")
    tp, pp, dp = (int(found[1]) if (found := re.search(rf"{k}(\d+)", named)) else 1 for k in ("TP", "PP", "DP"))
    chips = tp * pp * dp if named else nodes * each
    dp, changes = chips // (tp * pp), told.get("fix_hp", "")
    local, sequence = _changed("LBS", changes, case.local_batch), _changed("MPE", changes, case.sequence_length)
    whole = _changed("GBS", changes.upper(), case.global_batch or local * dp * _changed("GAS", changes, case.steps))
    if "GAS" in changes:
        whole = local * dp * _changed("GAS", changes, case.steps)
    profile = _model(case)
    stated = told.get("precision", "")
    precision: Any = "fp8" if "fp8" in stated else "tf32" if "495T" in changes else "bf16"
    plan = even_plan(
        profile.num_layers, tp=tp, pp=pp, dp=dp, sp=case.sp and tp > 1, micro_batches=max(1, whole // (local * dp)),
        micro_batch_size=local, sequence_length=sequence, zero=case.zero, stack=case.stack, precision=precision,
        recompute="selective" if "recompute=True" in changes else case.recompute,
        kernels=KernelChoice(attention="eager" if precision == "tf32" else None, dropout=case.dropout),
    )  # fmt: skip
    measured = number(told[_TOKENS])
    used = number(told["mem"])
    where = "A800" if chip[1] == "A100" and "A800" in text else chip[1]
    return PublicRun(
        name=name,
        kind="experts" if profile.layers[0].feed_forward.num_experts else "dense",
        plan=plan,
        pool=public_cluster(where, max(chips, each), 400.0 if where == "H100" else case.gbps),
        profile=profile,
        measured_s=plan.num_samples * sequence / chips / measured if measured else None,
        memory_bytes=used * GIB if used else None,
        memory_kind="device",
    )


def _changed(key: str, text: str, default: int) -> int:
    found = re.search(rf"{key}=(\d+)", text)
    return int(found[1]) if found else default


def _model(case: Case) -> ModelProfile:
    if case.config == "aquila2-7b":
        return llama(4096, 32, 32, 11008, 100008)
    return public_model(case.config, tied=case.tied)
