"""`to_torchtitan`: exports a plan to torchtitan as a configuration module, which also launches it.

torchtitan is configured by a Python function, which `--module` and `--config` name. Written for
`ConfigManager`, `ParallelismConfig` and the model builders of torchtitan 0.3.0;
`tests/plan/test_export_parsers.py` checks the exports against them.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from string import Template

from isthmus.core.job import Job, TrainingConfig
from isthmus.core.model import Model
from isthmus.core.plan import Plan
from isthmus.core.plan_parts.shard_group import ShardGroup
from isthmus.core.pool import Pool
from isthmus.plan.export.decoder_config import DecoderConfig, decoder_config, decoder_incompatibilities
from isthmus.plan.export.incompatibility import (
    Incompatibility,
    plan_name,
    require_compatible,
    word_incompatibilities,
)
from isthmus.plan.export.node_launches import device_incompatibilities, node_launches
from isthmus.plan.export.plan_export import PlanExport, model_folder, rank_map, training_config
from isthmus.plan.export.rank_grid import (
    RankGrid,
    grid_incompatibilities,
    interleaving_incompatibilities,
    local_steps_incompatibilities,
    rank_grid,
    rules_incompatibilities,
)
from isthmus.plan.search.costs.framework_rules import TORCHTITAN

NAME = TORCHTITAN.name


def to_torchtitan(
    plan: Plan, model: Model, pool: Pool, *, job: Job | None = None, data: str | None = None
) -> PlanExport:
    """Return the export of `plan`; `data` is a folder with the C4 data set, or one in its format.

    Without `data` it trains on torchtitan's test data; without `job` it runs 50 iterations. Raises
    `PlanError` with all reasons why torchtitan cannot run the plan.
    """
    name = plan_name(plan.id)
    require_compatible(NAME, TORCHTITAN.key, name, torchtitan_model_incompatibilities(model, plan.sequence_length))
    found = (*torchtitan_incompatibilities(plan, model), *device_incompatibilities(plan, pool, TORCHTITAN))
    require_compatible(NAME, TORCHTITAN.key, name, found)
    decoder = decoder_config(model)
    grid, training = rank_grid(plan), training_config(plan, job)
    launches = node_launches(plan, grid, pool)
    fields = {
        **_model_fields(decoder),
        **_training_fields(training),
        "plan": plan.id,
        "architecture": model.architecture,
        "ranks": "\n".join(rank_map(launches)),
        "nodes": "\n".join(f"    {one.node_rank}: {one.devices!r}," for one in launches),
        "model_path": repr(model_folder(model)),
        "data": f'dataset="c4", dataset_path={data!r}' if data else 'dataset="c4_test"',
        "recompute": "None" if plan.stages[0].recompute == "none" else "FullAC.Config()",
        "training": _assignments(training_values(plan, training)),
        "parallelism": _assignments(parallelism_values(plan, grid)),
        "log_rank": str(grid.num_ranks // grid.pp * (grid.pp - 1)),
    }
    template = resources.files("isthmus.plan.export").joinpath("torchtitan_config.txt")
    return PlanExport(
        framework=NAME,
        plan=plan.id,
        arguments=("--module", "FILE", "--config", "plan"),
        launches=launches,
        notes=_notes(plan, data),
        text=Template(template.read_text(encoding="utf-8")).substitute(fields),
    )


def torchtitan_incompatibilities(plan: Plan, model: Model) -> Iterator[Incompatibility]:
    """Yield why torchtitan cannot run a plan, whatever its devices."""
    yield from grid_incompatibilities(plan)
    yield from rules_incompatibilities(plan, model, TORCHTITAN)
    yield from interleaving_incompatibilities(plan)
    yield from local_steps_incompatibilities(plan, "only its torchft experiment does so, which is not exported")
    kinds = {"none" if stage.recompute_layers == 0 else stage.recompute for stage in plan.stages}
    partly = any(0 < (stage.recompute_layers or 0) < stage.num_layers for stage in plan.stages)
    if partly or len(kinds) > 1:
        yield Incompatibility("recomputation of some layers: it recomputes all layers or none")
    elif not kinds <= {"none", "full"}:
        text = f"'{kinds.pop()}' recomputation: its selective policy saves other tensors than the plan assumes"
        yield Incompatibility(text)
    if plan.zero > 1 and len(plan.pipeline()) > 1:
        yield Incompatibility(f"ZeRO {plan.zero} in a pipeline: it keeps full gradients until the last micro-batch")
    yield from word_incompatibilities(plan, ("sharding",))
    if plan.stages[0].ep > 1:
        yield Incompatibility(f"ep {plan.stages[0].ep}: only dense models are exported")


def torchtitan_model_incompatibilities(model: Model, sequence_length: int) -> Iterator[Incompatibility]:
    """Yield why torchtitan cannot train a model on sequences of `sequence_length` tokens, whatever the plan."""
    found = list(decoder_incompatibilities(model))
    yield from found
    if found:
        return
    decoder = decoder_config(model)
    shape = decoder.attention
    unsupported = {
        "experts": bool(decoder.expert_blocks),
        "latent attention": shape.latent is not None,
        "biases": shape.qkv_bias or shape.o_bias or any(block.bias for block in decoder.feed_forwards),
        "a window shorter than the sequence": shape.window is not None and shape.window < sequence_length,
        "partial rotary embeddings": decoder.rotary_share != 1.0,
        "blocks of several widths": len({block.intermediate_size for block in decoder.feed_forwards}) > 1,
        "norms of query and key and scaled positions": bool(shape.qk_norm) and decoder.rope.kind == "llama3",
    }
    for text in (text for text, found in unsupported.items() if found):
        yield Incompatibility(
            f"the model has {text}", final="torchtitan exports support dense Llama, Mistral and Qwen3 models only"
        )


def parallelism_values(plan: Plan, grid: RankGrid) -> dict[str, object]:
    """Return the fields of `ParallelismConfig`."""
    group = plan.sharding or ShardGroup()
    sharded = group.replicas or grid.dp if plan.zero > 0 else 1
    values: dict[str, object] = {
        "data_parallel_replicate_degree": grid.dp // sharded,
        "data_parallel_shard_degree": sharded,
        "fsdp_reshard_after_forward": "always" if plan.zero == 3 and group.reshard else "never",
        "tensor_parallel_degree": grid.tp,
        "enable_sequence_parallel": grid.sp,
        "context_parallel_degree": grid.cp,
        "pipeline_parallel_degree": grid.pp,
    }
    if grid.pp > 1:
        schedule = (
            "1F1B" if grid.num_chunks == 1 and plan.schedule == "interleaved" else TORCHTITAN.schedules[plan.schedule]
        )
        values |= {
            "pipeline_parallel_schedule": schedule,
            "pipeline_parallel_microbatch_size": plan.micro_batch_size,
            "module_fqns_per_model_part": module_names(grid),
        }
    return values


def module_names(grid: RankGrid) -> list[list[str]]:
    """Return the module names of each model chunk: the first chunk of every stage, then the second."""
    pieces: list[list[str]] = []
    layer = 0
    for count in (count for chunk in grid.chunk_layers for count in chunk):
        pieces.append([f"layers.{index}" for index in range(layer, layer + count)])
        layer += count
    return [["tok_embeddings", *pieces[0]], *pieces[1:-1], [*pieces[-1], "norm", "lm_head"]]


def training_values(plan: Plan, training: TrainingConfig) -> dict[str, object]:
    """Return the fields of `TrainingConfig`; a pipeline's local batch is all micro-batches of a replica."""
    staged = len(plan.pipeline()) > 1
    precision = plan.precision or training.precision
    values: dict[str, object] = {
        "local_batch_size": plan.micro_batch_size * (plan.micro_batches_of(0) if staged else 1),
        "global_batch_size": plan.num_samples,
        "seq_len": plan.sequence_length,
        "steps": training.steps,
        "max_norm": training.clip_norm,
        "mixed_precision_param": "float32" if precision == "fp32" else "bfloat16",
    }
    return values | ({"disable_cuda_graphs": True} if staged else {})


def _model_fields(decoder: DecoderConfig) -> dict[str, object]:
    shape = decoder.attention
    qwen = bool(shape.qk_norm)
    stretched = decoder.rope.kind == "llama3"
    return {
        "family": "qwen3" if qwen else "llama3",
        "parallelize": "qwen3" if qwen else "llama",
        "family_class": "Qwen3Model" if qwen else "Llama3Model",
        "block": "Qwen3" if qwen else "Llama3",
        "rope_class": "CosSinRoPE" if qwen else "ComplexRoPE",
        "scaling": f', scaling="llama", scaling_factor={decoder.rope.factor}' if stretched else "",
        "qk_norm": f"norm({shape.head_dim})" if qwen else None,
        "hidden_size": decoder.hidden_size,
        "vocab_size": decoder.vocab_size,
        "num_layers": len(decoder.feed_forwards),
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": decoder.feed_forwards[0].intermediate_size,
        "max_positions": max(decoder.max_positions, 131_072),
        "rope_theta": decoder.rope.theta,
        "norm_epsilon": decoder.norm_epsilon,
        "init_std": decoder.init_std,
        "tied": decoder.tied_embeddings,
    }


def _training_fields(training: TrainingConfig) -> dict[str, object]:
    return {
        "learning_rate": training.learning_rate,
        "min_lr_factor": training.min_learning_rate / training.learning_rate,
        "warmup_steps": training.warmup_steps,
        "weight_decay": training.weight_decay,
        "beta1": training.beta1,
        "beta2": training.beta2,
        "epsilon": training.epsilon,
        "seed": training.seed,
    }


def _assignments(values: dict[str, object]) -> str:
    return "\n".join(f"            {name}={value!r}," for name, value in values.items())


def _notes(plan: Plan, data: str | None) -> tuple[str, ...]:
    notes = []
    if data is None:
        notes.append("torchtitan's test data: give --data for training")
    if plan.zero and len(plan.pipeline()) > 1:
        notes.append("ZeRO 1 as FSDP with one weight gather per step: weights are sharded between steps")
    if len(plan.clusters) > 1:
        notes.append("all ranks must reach each other: NCCL does not support gateways between clusters")
    return tuple(notes)
