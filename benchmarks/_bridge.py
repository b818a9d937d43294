"""Performance summaries of NeMo Megatron Bridge, read from a copy of its repository; none of its data is kept here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks._bridge_recipes import FIRST_RELEASE, plan_fields, recipe_settings
from benchmarks._models import even_plan
from benchmarks._public_run import PublicRun, number, public_cluster, public_model, table_rows
from isthmus.core.plan_parts.kernel_choice import KernelChoice

REPOSITORY = "github.com/NVIDIA-NeMo/Megatron-Bridge"
FILES = ("docs/performance-summary.md", "docs/performance-summary-archive.md")

SYSTEMS = {
    "DGX-H100": ("H100", 8, 400.0),
    "DGX-B200": ("B200", 8, 400.0),
    "DGX-B300": ("B300", 8, 800.0),
    "DGX-GB200": ("GB200", 72, 400.0),
    "DGX-GB300": ("GB300", 72, 800.0),
}
"""Chip, chips of a domain, and network rate of each chip, from the data sheets of the systems."""

MODELS = {
    "llama3_8b": "llama-3.1-8b",
    "llama3_70b": "llama-3.1-70b",
    "llama3.1_405b": "llama-3.1-405b",
    "qwen3_30b_a3b": "qwen3-30b-a3b",
    "qwen3_235b_a22b": "qwen3-235b-a22b",
    "gptoss120b": "gpt-oss-120b",
    "gptoss_120b": "gpt-oss-120b",
    "deepseekv3": "deepseek-v3",
}
"""Models of which a published `config.json` is known here; the others (Mamba hybrids, Kimi) are left out."""

RECIPE_NAMES = {
    "llama3_8b": "llama3_8b",
    "llama3_70b": "llama3_70b",
    "llama3.1_405b": "llama31_405b",
    "qwen3_30b_a3b": "qwen3_30b_a3b",
    "qwen3_235b_a22b": "qwen3_235b_a22b",
    "gptoss120b": "gpt_oss_120b",
    "gptoss_120b": "gpt_oss_120b",
    "deepseekv3": "deepseek_v3",
}
_RECIPE_PRECISIONS = {"bf16": "bf16", "fp8": "fp8cs", "mxfp8": "fp8mx", "nvfp4": "nvfp4"}
_PRECISIONS = {"bf16": "bf16", "fp8": "fp8", "fp8-cs": "fp8", "mxfp8": "mxfp8", "fp8-mx": "mxfp8", "nvfp4": "nvfp4"}
_THROUGHPUT = "Tokens / sec / GPU"
_KERNELS = KernelChoice(attention="cudnn")
"""Recipes leave attention to Transformer Engine, which prefers cuDNN's since Hopper; `scripts/performance`, with which
the tables were measured, overlaps the exchanges of tensor parallelism (utils/overrides.py)."""


def read_bridge(folder: Path) -> list[PublicRun]:
    """Return the pre-training runs by release; raise `FileNotFoundError` where they are not there."""
    text = "\n" + "\n".join((folder / file).read_text(encoding="utf-8") for file in FILES)
    found: list[PublicRun] = []
    for release in re.split(r"\n(?=## \d)", text)[1:]:
        label = release.split()[1]
        for part in re.split(r"\n(?=####? )", release):
            heading = part.splitlines()[0]
            if "SFT" in heading or "LoRA" in heading:
                break
            named = heading.partition(":")[2].strip()
            for table in table_rows(part):
                for index, row in enumerate(table):
                    whole = {"Model": named, "System": named, **row}
                    if _THROUGHPUT in row and (run := _run(folder, f"{label} {named} {index}", whole)):
                        found.append(run)
    return found


def _run(folder: Path, name: str, row: dict[str, str]) -> PublicRun | None:
    model = re.sub(r"\(.*?\)", "", row["Model"]).strip().lower().replace(" ", "").replace("-", "")
    system, precision = row["System"], row.get("Precision", "").partition("(")[0].strip().lower()
    if model not in MODELS or system not in SYSTEMS or precision not in _PRECISIONS:
        return None
    chip, domain, gbps = SYSTEMS[system]
    count = {key: int(number(row.get(key, "")) or 1) for key in ("#-GPUs", "GBS", "MBS", "TP", "PP", "CP", "VP", "EP")}
    sequence, profile = int(number(row["Sequence Length"]) or 0), public_model(MODELS[model])
    dp = count["#-GPUs"] // (count["TP"] * count["PP"] * count["CP"])
    micro_batches, rest = divmod(count["GBS"], count["MBS"] * dp)
    tokens_per_chip_s = number(row[_THROUGHPUT])
    if dp < 1 or rest or not micro_batches or not tokens_per_chip_s:
        return None
    fields: dict[str, Any] = {"schedule": "1f1b"}
    chunks = count["VP"] if count["PP"] > 1 and micro_batches % count["PP"] == 0 else 1
    if 1 < chunks <= profile.num_layers // count["PP"]:
        fields = {"schedule": "interleaved", "chunks": count["VP"]}
    experts = profile.layers[-1].feed_forward.num_experts
    if tuple(int(part) for part in name.split()[0].split(".")[:2]) >= FIRST_RELEASE:
        kind = _RECIPE_PRECISIONS[_PRECISIONS[precision]]
        recipe = f"{RECIPE_NAMES[model]}_pretrain_{count['#-GPUs']}gpu_{chip.lower()}_{kind}_config"
        settings = recipe_settings(folder, recipe, count)
        if settings is not None:
            fields |= plan_fields(settings, profile.num_layers // count["PP"], experts=experts > 0)
    plan = even_plan(
        profile.num_layers, tp=count["TP"], pp=count["PP"], cp=count["CP"], dp=dp, sp=count["TP"] > 1,
        ep=count["EP"] if experts else 1, micro_batches=micro_batches, micro_batch_size=count["MBS"],
        sequence_length=sequence, precision=_PRECISIONS[precision], overlap_gradients=True, stack="megatron",
        overlap_tp=True if count["TP"] > 1 else None, kernels=_KERNELS,
        zero=3 if int(number(row.get("FSDP", "")) or 0) > 1 else 1, **fields,
    )  # fmt: skip
    return PublicRun(
        name=f"{name} {system} {row['Precision']}",
        kind="experts" if experts else "dense",
        plan=plan,
        pool=public_cluster(chip, count["#-GPUs"], gbps, domain),
        profile=profile,
        measured_s=count["GBS"] * sequence / count["#-GPUs"] / tokens_per_chip_s,
    )
