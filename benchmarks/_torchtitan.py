"""torchtitan's published benchmarks, read from a copy of its repository; none of its data is kept here."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks._models import even_plan
from benchmarks._public_run import GIB, PublicRun, number, public_cluster, public_model, table_rows
from isthmus.core.plan_parts.tensor_formats import TensorFormats
from isthmus.core.stack import Stack, find_stack

REPOSITORY = "github.com/pytorch/torchtitan"
NETWORK_GBPS = 400.0
"""Of each chip, as every file of the set states."""

SEQUENCE_LENGTH = 8192
"""Default of torchtitan's Llama 3 configurations."""

_MODELS = {"8b": "llama-3.1-8b", "70b": "llama-3.1-70b", "405b": "llama-3.1-405b"}
_FILES = {
    "llama3_h100_202412_torchtitan.md": "H100-HBM2e",
    "asyncTP_llama3_h100_2025-06_torchtitan.md": "H100-HBM2e",
    "llama3-8b_h200_202506_trainy-whitefiber.md": "H200",
}
_RECOMPUTE = (("full a", "full"), ("selective a", "selective"), ("per op sac", "selective"))
_THROUGHPUT = ("TPS/GPU", "Vanilla TP tokens/sec", "Async TP tokens/sec")


def read_torchtitan(folder: Path) -> list[PublicRun]:
    """Return the runs of `benchmarks/`; raise `FileNotFoundError` where they are not there."""
    found: list[PublicRun] = []
    for file, chip in _FILES.items():
        text = (folder / "benchmarks" / file).read_text(encoding="utf-8")
        stated = "Llama 3.1 8B. Local batch size 2. Selective AC." if "h200" in file else ""
        for title, table in _titled_tables(text):
            for index, row in enumerate(table):
                for column in _THROUGHPUT:
                    if column in row:
                        name = f"{file.partition('.')[0]}: {title[:9]} {index} {column.split()[0]}"
                        found.append(_run(name, chip, f"{title} {stated}".lower(), row, number(row[column]) or 0.0))
    return found


def _titled_tables(text: str) -> list[tuple[str, list[dict[str, str]]]]:
    """Return the tables of throughput, each with the heading above it."""
    pieces = re.split(r"\n(?=\*\*Table|#### |### )", text)
    return [
        (piece.splitlines()[0].strip("#* "), table)
        for piece in pieces
        for table in table_rows(piece)
        if table and any(column in table[0] for column in _THROUGHPUT)
    ]


def _run(name: str, chip: str, title: str, row: dict[str, str], tokens_per_chip_s: float) -> PublicRun:
    what = " ".join(f"{key} {value}" for key, value in row.items() if key not in _THROUGHPUT).lower()
    size = re.search(r"(8|70|405)b", title)
    if size is None:
        raise ValueError(f"{name}: no model in '{title}'")
    nodes = number(row.get("NUM_NODES", ""))
    chips = int(8 * nodes) if nodes else int(_first(r"(\d+) (?:gpus|h100s)", title, 8))
    degrees = {
        key: int(_first(rf"{word}[ =]?(\d+)", what, _first(rf"{word}[ =]?(\d+)", title, 1)))
        for key, word in (("tp", "tp"), ("pp", "pp"), ("cp", "cp"))
    }
    dp = chips // (degrees["tp"] * degrees["pp"] * degrees["cp"])
    batch = int(_first(r"local batch size (\d+)", title, 1))
    count = degrees["pp"] if degrees["pp"] > 1 else 1  # micro-batches, by default as many as stages
    sequence = int(number(row.get("Sequence Length", "")) or SEQUENCE_LENGTH)
    profile, told = public_model(_MODELS[f"{size[1]}b"]), f"{title} {what}".lower()
    narrow = "float8" in told or chip == "H200"
    plan = even_plan(
        profile.num_layers, **degrees, dp=dp, sp=degrees["tp"] > 1, micro_batches=count,
        micro_batch_size=batch // count, sequence_length=sequence, zero=3,
        stack=_stack(name, told), overlap_tp=True if "asynctp" in told or name.endswith("Async") else None,
        formats=_formats(told) if narrow else None,
        precision="fp8" if narrow else "bf16",
        schedule="interleaved" if "interleaved" in what else "1f1b",
        recompute=next((mode for word, mode in _RECOMPUTE if word in title), "none"),
    )  # fmt: skip
    memory = number(row.get("Memory(GiB)", ""))
    return PublicRun(
        name=name, kind="dense", plan=plan, pool=public_cluster(chip, chips, NETWORK_GBPS), profile=profile,
        measured_s=plan.num_samples * sequence / chips / tokens_per_chip_s,
        memory_bytes=memory * GIB if memory else None, memory_kind="reserved",
    )  # fmt: skip


def _stack(name: str, told: str) -> str | Stack:
    """Return the stack of a run: with layers compiled or not, with the loss compiled or not, by the set's versions.

    The H200 runs started `torchrun` itself, so nothing set the expandable segments of torchtitan's own script.
    """
    if "202412" in name:
        return "torchtitan-2024" if "compile" in told else "torchtitan-eager"
    stack = find_stack("torchtitan")
    if "h200" in name:
        return stack.model_copy(update={"name": "torchtitan-plain", "allocator": find_stack("hf-fsdp").allocator})
    return stack


def _formats(told: str) -> TensorFormats:
    """Return the formats of a run with products of 8 bits: with a scale for each row nothing gathers in 8 bits."""
    return TensorFormats(scales="row") if "rowwise" in told else TensorFormats(gathers="fp8")


def _first(pattern: str, text: str, default: float) -> float:
    found = re.search(pattern, text)
    return float(found[1]) if found else default
