"""How good plans of rollouts are: predicted steps, choices beside enumeration, sequences at once beside a sweep."""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._rollout_virtual import VirtualRun, random_pipeline
from isthmus.core.job import Job
from isthmus.core.model import load_model
from isthmus.core.plan import Plan, PlanSet, Prediction
from isthmus.core.pool import Pool
from isthmus.plan import ModelProfile, RolloutRequest, choose_rollouts, profile_model
from isthmus.plan.rollouts.advise_sequences import PAGE_TOKENS, advise_sequences
from isthmus.plan.rollouts.decode_option import DecodeOption, decode_option
from isthmus.serve.batching.batch_scheduler import BatchLimits, BatchScheduler
from isthmus.serve.batching.decode_records import DecodeRequest, SequenceKey
from isthmus.sim import DecodeRates, simulate_rollouts
from isthmus.sim.rollouts.simulate_rollouts import warm_steps

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 32000, "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}  # fmt: skip
CHIPS = ("H100", "A100", "V100")
HOST_RATIO = 60
"""Bandwidth of a chip's memory over that of its link to the host, over which evicted sequences move."""
TRAIN_SHARE = 0.4
"""Share of its chips' rate that training of these plans reaches."""


def step_errors(num_runs: int) -> Iterator[float]:
    """Yield predicted over virtual seconds of a step, less 1, for random pipelines."""
    for seed in range(num_runs):
        pipeline = random_pipeline(seed, steps=16)
        warm = warm_steps(pipeline.max_staleness)
        steps_s = VirtualRun(pipeline, warm + pipeline.steps).run().steps_s[warm:]
        yield simulate_rollouts(pipeline).step_s / (sum(steps_s) / len(steps_s)) - 1


def excess_times(num_pools: int) -> Iterator[float]:
    """Yield the step of the chosen plan over the best of all options, less 1, for random pools.

    An option: one of the clusters trains; of each other one any number of chips decodes, or the chip of rank 0 does, in
    turns. All are simulated.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        profile = profile_model(load_model(folder))
    for seed in range(num_pools):
        yield _excess(random.Random(seed), profile)


def _excess(drawn: random.Random, profile: ModelProfile) -> float:
    pool, job = _random_pool(drawn), _random_job(drawn)
    plans = tuple(_trained_plan(pool, one.name, job, profile) for one in pool.clusters)
    request = RolloutRequest(job=job, pool=pool, profile=profile)
    chosen = choose_rollouts(request, PlanSet(plans=plans)).plans[0]
    best_s = min(
        simulate_rollouts(option.pipeline).step_s
        for plan in plans
        for some in _all_ranks(pool, plan)
        if isinstance(option := decode_option(request, plan, some), DecodeOption)
    )
    if chosen.predicted is None:
        raise ValueError("a plan without a prediction")
    return chosen.predicted.iteration_s / best_s - 1


def _all_ranks(pool: Pool, plan: Plan) -> Iterator[list[tuple[str, str, int]]]:
    others = [one for one in pool.clusters if one.name != plan.stages[0].cluster]
    counts = [range(one.node_groups[0].num_chips + 1) for one in others]
    for ranks in itertools.product(*counts):
        yield [(one.name, one.node_groups[0].name, num) for one, num in zip(others, ranks, strict=True) if num]


def _random_pool(drawn: random.Random) -> Pool:
    names = "abc"[: drawn.choice((2, 3))]
    clusters = [
        {"name": name, "owner": name,
         "node_groups": [{"chip": drawn.choice(CHIPS), "nodes": 1, "chips_per_node": drawn.randint(1, 3)}]}
        for name in names
    ]  # fmt: skip
    links = [
        {"between": [a, b], "bandwidth_gbps": drawn.choice((0.05, 0.4, 2.0)), "round_trip_ms": drawn.choice((5, 50))}
        for a, b in itertools.combinations(names, 2)
        if drawn.random() < 0.9
    ]
    return Pool.model_validate({"version": 1, "clusters": clusters, "links": links})


def _random_job(drawn: random.Random) -> Job:
    longest = drawn.choice((128, 512))
    rl = {
        "group": 4, "max_prompt_tokens": 32, "max_response_tokens": longest,
        "max_staleness": drawn.choice((0, 1, 1, 4)), "reward": {"exact": True},
    }  # fmt: skip
    training = {
        "steps": 9, "sequence_length": longest + 32, "global_batch_size": drawn.choice((16, 48)), "learning_rate": 1e-6,
    }  # fmt: skip
    data = {"paths": ["p.jsonl"], "format": "prompts", "tokenizer": "bytes"}
    values: dict[str, Any] = {"name": "j", "task": "rl", "model": "m", "output": "o"}
    return Job.model_validate({**values, "rl": rl, "training": training, "data": data})


def _trained_plan(pool: Pool, cluster: str, job: Job, profile: ModelProfile) -> Plan:
    """Return a plan that trains on all chips of a cluster, at a share of their rate."""
    group = pool.cluster(cluster).node_groups[0]
    tokens = job.training.global_batch_size * job.training.sequence_length
    rate = group.num_chips * pool.chip(group).flop_per_s("bf16") * TRAIN_SHARE
    iteration_s = 6 * profile.num_parameters * tokens / rate
    found = Prediction(
        iteration_s=iteration_s, tgs_tokens_per_card_s=1, samples_per_s=1, peak_memory_bytes=(8 * 10**9,),
    )  # fmt: skip
    stages = [
        {"replica": number, "cluster": cluster, "node_group": group.name, "layers": (0, 16)}
        for number in range(group.num_chips)
    ]
    return Plan.model_validate(
        {"id": f"at-{cluster}", "stages": stages, "dp": group.num_chips, "micro_batches": 1, "micro_batch_size": 1,
         "sequence_length": job.training.sequence_length, "predicted": found}
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SequenceAdvice:
    """What the real scheduler shows at the advised number of sequences, over the best throughput that was swept."""

    advised: int
    evictions: int
    throughput_ratio: float


def sequence_advice(seed: int, num_samples: int) -> SequenceAdvice:
    """Sweep the sequences at once of the engine's own scheduler, steps timed by the decode model."""
    drawn = random.Random(seed)
    mean = drawn.choice((60, 150))
    lengths = [max(1, min(8 * mean, int(drawn.expovariate(1 / mean)))) for _ in range(200)]
    pages = drawn.choice((1000, 3000))
    rates = DecodeRates(
        host_s=2e-3, weights_s=drawn.uniform(2e-3, 8e-3), row_s=drawn.uniform(2e-6, 2e-5),
        cached_token_s=drawn.uniform(2e-8, 3e-7),
    )  # fmt: skip
    advised = advise_sequences((pages - 1) * PAGE_TOKENS, 16, lengths, num_samples)
    work = random.Random(seed + 10**6).choices(lengths, k=num_samples)
    swept = {max(1, round(advised * share)) for share in (0.25, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0)}
    found = {slots: _throughput(work, pages, slots, rates) for slots in swept if slots <= 256}
    return SequenceAdvice(
        advised=advised, evictions=found[advised][1],
        throughput_ratio=found[advised][0] / max(one for one, _ in found.values()),
    )  # fmt: skip


def _throughput(lengths: list[int], pages: int, slots: int, rates: DecodeRates) -> tuple[float, int]:
    """Return tokens a second and evictions of a scheduler with `slots` sequences at once."""
    limits = BatchLimits(num_pages=pages, page_tokens=PAGE_TOKENS, step_rows=256, max_sequences=slots)
    scheduler, spent_s = BatchScheduler(limits), 0.0
    for number, length in enumerate(lengths):
        scheduler.add(
            DecodeRequest(
                key=SequenceKey(number, 0), seed=0, prompt_tokens=(number % 251, *range(1, 16)), temperature=1.0,
                max_response_tokens=length, stop_tokens=frozenset(),
            )
        )  # fmt: skip
    while scheduler.sequences:
        plan = scheduler.plan_step()
        rows = sum(len(one.tokens) for one in plan.rows)
        cached = sum(one.begin for one in plan.rows)
        moved = sum(one.num_rows for one in (*plan.swapped_out, *plan.swapped_in))
        spent_s += rates.step_s(rows, cached) + moved * rates.cached_token_s * HOST_RATIO
        for one in plan.rows:
            sequence = scheduler.find(one.key)
            scheduler.complete(one, 0 if one.decodes else None)
            if one.decodes and sequence.num_response >= lengths[one.key.prompt]:
                scheduler.remove(one.key)
    return sum(lengths) / spent_s, scheduler.num_swaps
