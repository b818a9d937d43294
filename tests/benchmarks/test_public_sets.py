"""The adapters of public sets, on tables of the same form with figures made up here."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks._bridge import FILES, read_bridge
from benchmarks._bridge_recipes import RECIPES, plan_fields
from benchmarks._flagperf import CASES, read_flagperf
from benchmarks._public_rows import forecast_of, public_rows, split
from benchmarks._public_run import number, table_rows
from benchmarks._torchtitan import read_torchtitan
from isthmus.plan import predict

TITAN = """### Results

**Table 1** 2D Parallelism. Llama 3.1 8B model. 16 GPUs (FSDP 8, TP 2). Local batch size 4. Full activation memory.

| Techniques | TPS/GPU | Memory(GiB) |
| ----- | ----: | ----: |
| FSDP + torch.compile | 5,000 | 50.5 |
| FSDP + torch.compile + Float8 | 6,000 | 50.0 |
"""
BRIDGE = """## 99.01 NeMo Container
### Pre-Training Performance
#### Model: LLAMA3_8B
| System | #-GPUs | Precision | GBS | MBS | Sequence Length | TP | PP | CP | VP | EP | Tokens / sec / GPU | x |
|---|---|---|---|---|---|---|---|---|---|---|---|---|
| DGX-H100 | 8 | FP8 | 128 | 1 | 8192 | 1 | 1 | 1 | n/a | n/a | 14000 | 1 |
| DGX-H100 | 8 | FP8 | 127 | 1 | 8192 | 1 | 1 | 1 | n/a | n/a | 14000 | 1 |
| DGX-Z9 | 8 | FP8 | 128 | 1 | 8192 | 1 | 1 | 1 | n/a | n/a | 14000 | 1 |
### LoRA Performance
#### Model: LLAMA3_8B
| System | #-GPUs | Precision | GBS | MBS | Sequence Length | TP | PP | CP | VP | EP | Tokens / sec / GPU | x |
|---|---|---|---|---|---|---|---|---|---|---|---|---|
| DGX-H100 | 8 | FP8 | 128 | 1 | 8192 | 1 | 1 | 1 | n/a | n/a | 99000 | 1 |
"""
FLAG = """| 配置 | precision | parallel | fix_hp | token/p/s | mem |
|---|---|---|---|---|---|
| A100单机8卡（1x8） | bf16 | PP2DP4TP1 | LBS=2 | 3000.5 | 70/80 |
| A100单机8卡（1x8） | bf16 | PP1DP8TP1 | / | / | OOM |
| \\*单机8卡（1x8） | bf16 | PP2DP4TP1 | / | 2000 | \\* |
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of all sets, most of them empty."""
    titan = tmp_path / "benchmarks"
    titan.mkdir()
    names = ("llama3_h100_202412", "asyncTP_llama3_h100_2025-06")
    for name in names:
        (titan / f"{name}_torchtitan.md").write_text(TITAN if name == names[0] else "", encoding="utf-8")
    (titan / "llama3-8b_h200_202506_trainy-whitefiber.md").write_text("", encoding="utf-8")
    for file in FILES:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(BRIDGE if file == FILES[0] else "", encoding="utf-8")
    for case in CASES:
        readme = tmp_path / "training" / "nvidia" / case / "README.md"
        readme.parent.mkdir(parents=True)
        readme.write_text(FLAG if case == "aquila2_7b-flagscale" else "", encoding="utf-8")
    return tmp_path


def test_torchtitan_states_degrees_in_its_headings(folder: Path) -> None:
    """Chips, FSDP, TP, batch and recomputation of the heading; precision and figures of the row."""
    first, second = read_torchtitan(folder)
    plan = first.plan
    assert (plan.dp, plan.stages[0].tp, plan.micro_batch_size, plan.zero) == (8, 2, 4, 3)
    assert (plan.stages[0].recompute, plan.stages[0].sp, plan.stack) == ("full", True, "torchtitan-2024")
    assert first.measured_s == pytest.approx(8 * 4 * 8192 / 16 / 5000)
    assert first.memory_bytes == 50.5 * 2**30
    assert (plan.precision, second.plan.precision) == ("bf16", "fp8")


def test_flagperf_names_what_ran_out_of_memory(folder: Path) -> None:
    """Degrees in any order, changes of the batch; a chip without a name is left out."""
    ran, failed = read_flagperf(folder)
    assert (len(ran.plan.pipeline()), ran.plan.dp, ran.plan.micro_batch_size) == (2, 4, 2)
    assert ran.measured_s == pytest.approx(ran.plan.num_samples * 2048 / 8 / 3000.5)
    assert (ran.memory_bytes, ran.ran) == (70 * 2**30, True)
    assert (failed.ran, failed.memory_bytes, failed.plan.dp) == (False, None, 8)


def test_bridge_leaves_out_what_cannot_be_written(folder: Path) -> None:
    """A batch that is no multiple, a system without a data sheet, and fine-tuning."""
    (run,) = read_bridge(folder)
    assert run.measured_s == pytest.approx(128 * 8192 / 8 / 14000)
    assert (run.kind, run.plan.stack, run.plan.precision) == ("dense", "megatron", "fp8")


RECIPE = """
def _common(cfg):
    cfg.ddp.grad_reduce_in_fp32 = False

def llama3_8b_pretrain_8gpu_h100_fp8cs_config() -> ConfigContainer:
    cfg = llama3_8b_pretrain_config()
    cfg.model.tensor_model_parallel_size = 1
    cfg.train.micro_batch_size = 1
    cfg.model.virtual_pipeline_model_parallel_size = None
    cfg.model.recompute_granularity = "full"
    cfg.model.recompute_num_layers = 5
    cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=True)
    cfg.model.cpu_offloading = unknown()
    _common(cfg)
    return cfg
"""


def test_bridge_takes_from_a_recipe_of_equal_degrees_what_its_table_lacks(folder: Path) -> None:
    """Recomputation and the format of gradients; not from a recipe with another batch, nor for an earlier release."""
    file = folder / RECIPES / "llama" / "h100" / "llama3.py"
    file.parent.mkdir(parents=True)
    file.write_text(RECIPE, encoding="utf-8")
    (run,) = read_bridge(folder)
    assert (run.plan.stages[0].recompute, run.plan.stages[0].recompute_layers) == ("full", 5)
    assert run.plan.formats is not None
    assert (run.plan.formats.gradients, run.plan.stages[0].offload, run.plan.experts) == ("bf16", None, None)
    file.write_text(RECIPE.replace("micro_batch_size = 1", "micro_batch_size = 2"), encoding="utf-8")
    assert read_bridge(folder)[0].plan.stages[0].recompute == "none"
    file.write_text(RECIPE, encoding="utf-8")
    (folder / FILES[0]).write_text(BRIDGE.replace("99.01", "25.11"), encoding="utf-8")
    assert read_bridge(folder)[0].plan.stages[0].recompute == "none"


def test_a_recipe_for_experts_names_their_exchange() -> None:
    """`flex` is the dispatcher of DeepEP and HybridEP; only modules that plans know."""
    settings = {
        "model.moe_token_dispatcher_type": "flex",
        "comm_overlap.overlap_moe_expert_parallel_comm": True,
        "model.recompute_modules": ["mla_up_proj", "unknown"],
    }
    fields = plan_fields(settings, 4, experts=True)
    assert (fields["experts"].dispatcher, fields["experts"].overlap) == ("deepep", True)
    assert (fields["recompute"], fields["recompute_modules"]) == ("selective", ("mla_up_proj",))
    assert plan_fields({}, 4, experts=False) == {}


def test_seen_and_unseen_are_apart_and_the_same_for_a_seed(folder: Path) -> None:
    """At least one run is seen; those that ran out of memory are in neither part."""
    runs = read_flagperf(folder) * 12
    seen, unseen = split(runs, 0)
    assert (len(seen), len(unseen)) == (1, 11)
    assert split(runs, 0) == (seen, unseen)
    assert all(run.ran for run in seen + unseen)


def test_long_steps_are_continued_in_line(folder: Path) -> None:
    """A step of many micro-batches takes as long as its simulation says, within a per cent."""
    (run,) = read_bridge(folder)
    assert run.plan.micro_batches > 8
    assert forecast_of(run).iteration_s == pytest.approx(predict(run.plan, run.pool, run.profile).iteration_s, rel=0.01)


@pytest.mark.parametrize("name", ["torchtitan", "flagperf", "bridge"])
def test_a_set_that_is_not_there_is_a_row(tmp_path: Path, name: str) -> None:
    """It says how to name it; a folder of something else is an error."""
    (row,) = public_rows(name, None)
    assert f"--{name}" in row.what
    with pytest.raises(FileNotFoundError):
        public_rows(name, tmp_path)


@pytest.mark.parametrize("text", ["", "|", "| a |\n|---|\n| 1 | 2 |", "no table"])
def test_text_without_rows_has_none(text: str) -> None:
    """Rows of another width than their header are left out."""
    assert [row for table in table_rows(text) for row in table] == []


def test_numbers_of_cells() -> None:
    """Commas between thousands; the first of several; none in words."""
    assert [number(text) for text in ("3,698.7", "56/80", "37556 (36108)", "n/a", "")] == [
        3698.7,
        56,
        37556,
        None,
        None,
    ]
