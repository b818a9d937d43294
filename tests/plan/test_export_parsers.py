"""Rules of exports before the real parsers of the released packages.

megatron-core's reader of layouts is a small wheel that `make setup` installs. The whole command line needs
`megatron.training`, which the wheels hold since 0.17 (Python 3.12), and torchtitan a stack of its own; both
need triton. Without them the tests are skipped, with the command that installs what they need.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from isthmus.core.model import Model, load_model
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.plan import profile_model
from isthmus.plan.export.megatron import to_megatron
from isthmus.plan.export.megatron_layout import layout_text
from isthmus.plan.export.plan_export import PlanExport
from isthmus.plan.export.rank_grid import rank_grid
from isthmus.plan.export.torchtitan import to_torchtitan
from tests.plan.hand import model_of, pool_of
from tests.plan.plans import grids, staged

pytestmark = pytest.mark.slow  # these packages import torch
HERE = Path(__file__).parent
POOL = pool_of("H100", "H100", nodes=64)
MEGATRON = "pip install --no-deps 'megatron-core>=0.17' triton   (Python 3.12 or newer)"
TORCHTITAN = "pip install torchtitan==0.3.0 triton"


def needs(command: str, *modules: str) -> pytest.MarkDecorator:
    """Skip, and say what would install it, where a module is missing."""
    missing = [name for name in modules if not _there(name)]
    return pytest.mark.skipif(bool(missing), reason=f"no {', '.join(missing)}: {command}")


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def asked(script: str, requests: list[dict], **environment: str) -> list[dict]:
    """Return the answers of a parser's process."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / script)],
        input=json.dumps(requests), text=True, capture_output=True, check=False,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment,
    )  # fmt: skip
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert answers, done.stderr[-2000:]
    found: list[dict] = json.loads(answers[0].removeprefix("ANSWER "))
    return found


def ranks(made: PlanExport) -> int:
    return sum(len(one.devices) for one in made.launches)


def drawn(count: int) -> list[Plan]:
    """Return the first plans that hypothesis draws."""
    found: list[Plan] = []

    @settings(max_examples=count, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(grids())
    def collect(plan: Plan) -> None:
        found.append(plan)

    collect()
    return found


@needs("pip install --no-deps megatron-core", "megatron.core")
def test_the_real_layout_reader_gives_back_the_plan():
    """Embedding, layers and loss of every stage and piece, read by megatron-core, are those of the plan."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.transformer.enums import LayerType
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    for plan in drawn(200):
        grid = rank_grid(plan)
        read = PipelineParallelLayerLayout(layout_text(grid.chunk_layers), grid.pp)
        read.validate_layer_layout(plan.num_layers, None)
        stages = [sum(piece.count(LayerType.decoder) for piece in read.layout[stage]) for stage in range(grid.pp)]
        assert stages == [stage.num_layers for stage in plan.pipeline()]
        assert read.virtual_pipeline_model_parallel_size == grid.num_chunks


@needs(MEGATRON, "megatron.training", "triton")
def test_the_real_parser_of_megatron_gives_back_the_plan():
    """Degrees, cuts, batches and recomputation, as Megatron-LM parses and validates them, are the plan's."""
    plans = drawn(60)
    made = [to_megatron(plan, model_of(plan.num_layers), POOL) for plan in plans]
    for plan, read in zip(plans, megatron_reads(made), strict=True):
        grid = rank_grid(plan)
        assert "refused" not in read, read
        assert {key: read[key] for key in ("pp", "dp", "tp", "cp", "ep", "sp")} == {
            key: value for key, value in vars(grid).items() if key != "parts"
        }
        if grid.pp > 1:
            assert read["parts"] == [list(chunk) for chunk in grid.chunk_layers]
        assert read["micro_batch_size"] == plan.micro_batch_size
        assert read["global_batch_size"] == plan.num_samples
        assert read["sequence_length"] == plan.sequence_length
        assert read["distributed_optimizer"] == bool(plan.zero)
        for stage in plan.stages:
            assert recomputed(read["recompute"], stage.num_layers) == (
                0 if stage.recompute == "none" else stage.recompute_layers
            )


def recomputed(said: list, num_layers: int) -> int:
    """Return how many of a stage's layers Megatron-LM recomputes, as its `TransformerBlock` counts them."""
    granularity, method, count = said
    if granularity is None:
        return 0
    return num_layers if method == "uniform" else min(count, num_layers)


def megatron_reads(made: list[PlanExport]) -> list[dict]:
    """Return what Megatron-LM reads. A test machine has no Transformer Engine, whose fusion is left out."""
    requests = [{"world": ranks(one), "arguments": [*one.arguments, "--no-rope-fusion"]} for one in made]
    return asked("parse_megatron.py", requests, CUDA_DEVICE_MAX_CONNECTIONS="1")


MODELS = ("llama-3.1-8b", "llama-3.2-1b", "mistral-7b-v0.1", "phi-3-mini-4k", "qwen2.5-7b", "qwen3-32b")
SPARSE = (
    "deepseek-v2-lite",
    "deepseek-v3",
    "mixtral-8x7b",
    "qwen1.5-moe-a2.7b",
    "qwen2-57b-a14b",
    "qwen3-30b-a3b",
)


def released(name: str, **fields: object) -> tuple[Plan, Model, Pool]:
    """Return an uneven plan of a released model."""
    model = load_model(HERE / "configs" / f"{name}.json")
    cut = model.num_layers // 2 + 1
    known = {"dp": 2, "tp": 2, "sp": True, "zero": 1, "ep": 2 if name in SPARSE else 1}
    return staged((cut, model.num_layers - cut), **(known | fields)), model, POOL


@needs(MEGATRON, "megatron.training", "triton")
def test_the_real_parser_of_megatron_takes_released_models():
    """Dense and sparse models: their size, experts and vocabulary are those of config.json."""
    for name, read in zip(
        MODELS + SPARSE,
        megatron_reads([to_megatron(*released(name)) for name in MODELS + SPARSE]),
        strict=True,
    ):
        model = load_model(HERE / "configs" / f"{name}.json")
        assert "refused" not in read, (name, read)
        assert read["hidden_size"] == model.hidden_size
        assert read["vocabulary"] == model.vocab_size
        assert (read["experts"] is not None) == (name in SPARSE)


@needs(TORCHTITAN, "torchtitan", "triton", "datasets", "tyro")
def test_the_real_parser_of_torchtitan_gives_back_the_plan(tmp_path):
    """Degrees, modules and batches are those of the plan; the model has the parameters of its profile."""
    cases = {
        "dense": released("llama-3.1-8b"),
        "normed": released("qwen3-8b", recompute="full", tp=1, sp=False),
        "interleaved": released("llama-2-7b", dp=1, schedule="interleaved", zero=0),
        "single": (staged((16,), micro_batches=1, dp=2, zero=3), *released("llama-3.2-1b")[1:]),
        "context": released("mistral-7b-v0.1", cp=2, dp=1),
    }
    requests, made = [], {name: to_torchtitan(*case) for name, case in cases.items()}
    for name, one in made.items():
        file = tmp_path / f"config_{name}.py"
        file.write_text(one.text)
        requests.append({"file": str(file), "world": ranks(one)})
    for (plan, model, _), read in zip(cases.values(), asked("parse_torchtitan.py", requests), strict=True):
        grid = rank_grid(plan)
        assert "refused" not in read, read
        dims = read["dims"]
        assert [dims[key] for key in ("pp", "tp", "cp", "ep")] == [grid.pp, grid.tp, grid.cp, grid.ep]
        assert (dims["dp_replicate"], dims["dp_shard"]) == ((1, grid.dp) if plan.zero else (grid.dp, 1))
        assert read["parameters"] == profile_model(model).num_parameters
        assert read["training"]["global_batch_size"] == plan.num_samples
        if grid.pp > 1:
            counts = [sum(name.startswith("layers.") for name in part) for part in read["parts"]]
            assert counts == [count for chunk in grid.chunk_layers for count in chunk]
            assert read["training"]["local_batch_size"] == plan.micro_batches * plan.micro_batch_size
            assert read["micro_batch_size"] == plan.micro_batch_size
        assert ("FullAC" in read["recompute"]) == (plan.stages[0].recompute == "full")
