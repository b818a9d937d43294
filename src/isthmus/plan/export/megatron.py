"""`to_megatron`: exports a plan to Megatron-LM as arguments and a launch script for every node.

Written for the parsers of megatron-core 0.16 to 0.19 (`megatron.training.arguments`, `TransformerConfig`,
`PipelineParallelLayerLayout`); `tests/plan/test_export_parsers.py` checks the exports against them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from isthmus.core.job import Job, TrainingConfig
from isthmus.core.model import Model
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.plan.export.decoder_config import decoder_config, decoder_incompatibilities
from isthmus.plan.export.flag import Flag, flag
from isthmus.plan.export.incompatibility import (
    Incompatibility,
    plan_name,
    require_compatible,
    word_incompatibilities,
)
from isthmus.plan.export.megatron_layout import layout_text
from isthmus.plan.export.megatron_model import model_arguments, model_incompatibilities
from isthmus.plan.export.megatron_recompute import recompute_arguments, recompute_incompatibilities
from isthmus.plan.export.node_launches import NodeLaunch, device_incompatibilities, node_launches
from isthmus.plan.export.plan_export import PlanExport, model_folder, rank_map, training_config
from isthmus.plan.export.rank_grid import (
    RankGrid,
    grid_incompatibilities,
    interleaving_incompatibilities,
    local_steps_incompatibilities,
    rank_grid,
    rules_incompatibilities,
)
from isthmus.plan.search.costs.framework_rules import MEGATRON

NAME = MEGATRON.name

_CONTEXT_KINDS = {"gather": "all_gather", "ring": "p2p", "all_to_all": "a2a"}
_DISPATCHERS = {
    "all_gather": [flag("moe-token-dispatcher-type", "allgather")],
    "deepep": [flag("moe-token-dispatcher-type", "flex"), flag("moe-enable-deepep")],
}


def to_megatron(plan: Plan, model: Model, pool: Pool, *, job: Job | None = None, data: str | None = None) -> PlanExport:
    """Return the export of `plan`; `data` is the path prefix of data preprocessed by Megatron-LM.

    Without `data` it trains on mock data; without `job` it runs 50 iterations, enough to measure the plan.
    Raises `PlanError` with all reasons why Megatron-LM cannot run the plan.
    """
    name = plan_name(plan.id)
    require_compatible(NAME, MEGATRON.key, name, megatron_model_incompatibilities(model))
    found = (*megatron_incompatibilities(plan, model), *device_incompatibilities(plan, pool, MEGATRON))
    require_compatible(NAME, MEGATRON.key, name, found)
    decoder = decoder_config(model)
    grid = rank_grid(plan)
    training = training_config(plan, job)
    flags = [
        *_dispatched(plan, model_arguments(decoder, plan.sequence_length, grid.tp, grid.ep)),
        *_parallel(plan, grid),
        *recompute_arguments(plan),
        *_training(plan, training),
        *_data(model, data),
    ]
    arguments = tuple(word for one in flags for word in one.as_words())
    launches = node_launches(plan, grid, pool)
    return PlanExport(
        framework=NAME,
        plan=plan.id,
        arguments=arguments,
        launches=launches,
        notes=_notes(plan, data),
        text=_script(plan, flags, launches),
    )


def megatron_incompatibilities(plan: Plan, model: Model) -> Iterator[Incompatibility]:
    """Yield why Megatron-LM cannot run a plan, whatever its devices."""
    yield from grid_incompatibilities(plan)
    yield from rules_incompatibilities(plan, model, MEGATRON)
    yield from interleaving_incompatibilities(plan)
    yield from local_steps_incompatibilities(plan, "it reduces gradients every step")
    if plan.zero > 1:
        yield Incompatibility(f"ZeRO {plan.zero}: its distributed optimizer is ZeRO 1")
    if plan.optimizer_on_host and plan.zero != 1 and plan.dp > 1:
        yield Incompatibility("the optimizer on the host, unsharded: it offloads only the distributed optimizer")
    first, has_experts = plan.stages[0], bool(decoder_config(model).expert_blocks)
    if has_experts and first.tp > 1 and not first.sp:
        yield Incompatibility("experts with tp but without sequence parallelism")
    if not has_experts and first.ep > 1:
        yield Incompatibility(f"ep {first.ep} for a model without experts")
    yield from recompute_incompatibilities(plan)
    yield from word_incompatibilities(plan, ("recompute_modules", "cp_kind", "experts", "formats", "overlap_tp"))
    formats = plan.formats
    if formats is not None and (formats.activations or formats.gathers or formats.dispatch or formats.scales):
        yield Incompatibility("formats other than that of gradients are not exported")
    if plan.experts is not None and plan.experts.overlap:
        yield Incompatibility("overlapped expert exchanges are not exported")


def megatron_model_incompatibilities(model: Model) -> Iterator[Incompatibility]:
    """Yield why Megatron-LM cannot train a model, whatever the plan."""
    found = list(decoder_incompatibilities(model))
    yield from found
    if not found:
        yield from model_incompatibilities(decoder_config(model))


def _dispatched(plan: Plan, flags: Sequence[Flag]) -> list[Flag]:
    """Return the model's options with the dispatcher that the plan names instead of `alltoall`."""
    own = _DISPATCHERS.get(plan.experts.dispatcher) if plan.experts else None
    if own is None:
        return list(flags)
    return [one for old in flags for one in (own if old.name == own[0].name else (old,))]


def _parallel(plan: Plan, grid: RankGrid) -> list[Flag]:
    flags = [
        flag("tensor-model-parallel-size", grid.tp),
        flag("pipeline-model-parallel-size", grid.pp),
        flag("context-parallel-size", grid.cp),
    ]
    if grid.pp > 1:
        flags.append(flag("pipeline-model-parallel-layout", layout_text(grid.chunk_layers)))
    if grid.sp:
        flags.append(flag("sequence-parallel"))
    if plan.zero or plan.optimizer_on_host:
        flags.append(flag("use-distributed-optimizer"))
    if plan.optimizer_on_host:
        flags += [flag("use-precision-aware-optimizer"), flag("optimizer-cpu-offload")]
    if plan.overlap_gradients:
        flags.append(flag("overlap-grad-reduce"))
    if grid.cp > 1:  # without it Megatron-LM takes p2p
        flags.append(flag("cp-comm-type", _CONTEXT_KINDS[plan.stages[0].cp_kind]))
    if plan.formats is not None and plan.formats.gradients == "bf16":
        flags.append(flag("grad-reduce-in-bf16"))
    if plan.overlap_tp:
        flags.append(flag("tp-comm-overlap"))
    return flags


def _training(plan: Plan, training: TrainingConfig) -> list[Flag]:
    flags = [
        flag("micro-batch-size", plan.micro_batch_size),
        flag("global-batch-size", plan.num_samples),
        flag("train-iters", training.steps),
        flag("lr", training.learning_rate),
        flag("min-lr", training.min_learning_rate),
        flag("lr-decay-style", "cosine"),
        flag("lr-decay-iters", training.steps),
        flag("lr-warmup-iters", training.warmup_steps),
        flag("weight-decay", training.weight_decay),
        flag("adam-beta1", training.beta1),
        flag("adam-beta2", training.beta2),
        flag("adam-eps", training.epsilon),
        flag("clip-grad", training.clip_norm),
        flag("seed", training.seed or 1),
        flag("eval-iters", 0),
        flag("log-interval", 1),
        flag("log-throughput"),
    ]
    precision = plan.precision or training.precision
    return flags + ([flag(precision)] if precision in ("bf16", "fp16") else [])


def _data(model: Model, data: str | None) -> list[Flag]:
    if data is None:
        kind = [flag("mock-data"), flag("tokenizer-type", "NullTokenizer")]
        return [*kind, flag("vocab-size", model.vocab_size)]
    tokenizer = [flag("tokenizer-type", "HuggingFaceTokenizer"), flag("tokenizer-model", model_folder(model))]
    return [flag("data-path", data), flag("split", "99,1,0"), *tokenizer]


def _notes(plan: Plan, data: str | None) -> tuple[str, ...]:
    notes = []
    if data is None:
        notes.append("mock data: give --data for training")
    if plan.transport == "buffered" and len(plan.pipeline()) > 1:
        notes.append("sends wait for their receives (NCCL); the plan was predicted with buffered messages")
    if len(plan.clusters) > 1:
        notes.append("all ranks must reach each other: NCCL does not support gateways between clusters")
    return tuple(notes)


def _script(plan: Plan, flags: Sequence[Flag], launches: Sequence[NodeLaunch]) -> str:
    """Return the shell script for all nodes, each with its `NODE_RANK` and the same `MASTER_ADDR`."""
    cases = [
        f"    {one.node_rank}) devices={','.join(map(str, one.devices))} nproc={len(one.devices)} ;;"
        for one in launches
    ]
    lines = [" ".join(shlex.quote(word) for word in one.as_words()) for one in flags]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# Plan '{plan.id}' for Megatron-LM, written by `isthmus export`. In a checkout of Megatron-LM:",
            "#   MASTER_ADDR=HOST NODE_RANK=N bash THIS_FILE [further arguments]",
            "# As a rank that is started with RANK set, it runs that rank alone. MEGATRON_LM may name the checkout.",
            "#",
            *(f"# {line}" for line in rank_map(launches)),
            "set -euo pipefail",
            "export CUDA_DEVICE_MAX_CONNECTIONS=1",
            'if [ -n "${RANK:-}" ]; then',
            "  launch=(python)",
            "else",
            '  case "${NODE_RANK:?the number of this node, see above}" in',
            *cases,
            '    *) echo "no such node: $NODE_RANK" >&2; exit 2 ;;',
            "  esac",
            "  export CUDA_VISIBLE_DEVICES=$devices",
            f'  launch=(torchrun --nnodes {len(launches)} --nproc-per-node "$nproc" --node-rank "$NODE_RANK"',
            '    --master-addr "${MASTER_ADDR:?the host of node rank 0}" --master-port "${MASTER_PORT:-29500}")',
            "fi",
            'exec "${launch[@]}" "${MEGATRON_LM:-.}/pretrain_gpt.py" \\',
            *(f"  {line} \\" for line in lines),
            '  "$@"',
            "",
        ]
    )
