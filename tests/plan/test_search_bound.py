"""Rules of the proof behind `bound_s`: whatever ran in a time is never refuted for that time."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._planning import LLAMA2_7B, job, llama, pool
from benchmarks.search_quality import layouts, seconds
from isthmus.core.model import Model
from isthmus.core.plan import StageTime
from isthmus.core.pool import Pool
from isthmus.plan.profile.model_profile import profile_model
from isthmus.plan.search.bound.layers_within_time import StageLimit, layers_within_time
from isthmus.plan.search.bound.micro_batch_bound import StageBlock, max_micro_batches
from isthmus.plan.search.bound.prove_bound import OPTIMALITY_GAP, Refutation, prove_bound
from isthmus.plan.search.bound.relaxations import Relaxations
from isthmus.plan.search.costs.routes import Routes
from isthmus.plan.search.costs.search_limits import SearchLimits
from isthmus.plan.search.costs.slots import cluster_slots
from isthmus.plan.search.costs.workload import TrainingWorkload
from isthmus.plan.search.finish.score_plan import calibration_for
from isthmus.plan.search.pipelines.search_space import SearchSpace
from isthmus.plan.search.search_plans import SearchRequest, search_plans
from isthmus.schedule import make_schedule, overlapped
from isthmus.sim import SimulatedLink
from isthmus.sim.pipeline.run_pipeline import run_pipeline

pytestmark = pytest.mark.integration

BYTES = 1e6

block = st.fixed_dictionaries(
    {
        "layers": st.lists(st.integers(0, 4), min_size=1, max_size=3),  # by stage; 0: a place left empty
        "layer_s": st.floats(0.1, 2),
        "forward": st.floats(0.2, 0.6),
        "reduce_s": st.floats(0, 1),
        "hop_s": st.floats(0, 2),
        "wire_s": st.floats(0, 1),
    }
)
"""Stages of one kind, and the way to them from the stages before."""

chains = st.lists(block, min_size=1, max_size=3).filter(lambda blocks: all(sum(one["layers"]) for one in blocks))


def run(blocks, micro_batches, schedule):
    """Return the seconds of a pipeline that really has these layers: its run, then each stage's reduction."""
    times, wires, rows = [], {}, []
    for one in blocks:
        held = [count for count in one["layers"] if count]
        for place, count in enumerate(held):
            stage, seconds = len(times), count * one["layer_s"]
            times.append(StageTime(forward_s=seconds * one["forward"], backward_s=seconds * (1 - one["forward"])))
            rows.append(count * one["reduce_s"])
            if place == 0 and stage:
                for ends in ((stage - 1, stage), (stage, stage - 1)):
                    rate = BYTES / max(one["wire_s"], 1e-9)
                    wires[ends] = SimulatedLink(name=f"{ends}", bytes_per_s=rate, delay_s=one["hop_s"])
    count = len(times)
    if schedule == "overlapped":
        made = overlapped(count, micro_batches)
    else:
        made = make_schedule(schedule, count, micro_batches)
    ran = run_pipeline(made, times, wires, BYTES)
    return max(end + more for end, more in zip(ran.finish_s, rows, strict=True))


def limits(blocks, micro_batches, ahead):
    """Return what the proof knows of the pipeline: the possible stages, not how many layers they take."""
    found, after = [], sum(len(one["layers"]) for one in blocks)
    for place, one in enumerate(blocks):
        for own, _ in enumerate(one["layers"]):
            after -= 1
            wire_s = max(one["wire_s"], 1e-9) if place and not own else 0.0
            found.append(
                StageLimit(
                    [n * one["layer_s"] for n in range(1, 15)], one["layer_s"],
                    one["forward"], one["forward"],
                    ahead * after if ahead else micro_batches, one["reduce_s"],
                    hop_s=one["hop_s"] + wire_s if place and not own else 0.0,
                    wire_s=micro_batches * wire_s,
                )
            )  # fmt: skip
    return found


def parts(blocks):
    return [[StageBlock(len(one["layers"]), one["layer_s"], one["reduce_s"], one["forward"])] for one in blocks]


schedules = st.sampled_from([("1f1b", 1), ("overlapped", 2), ("gpipe", 0)])


@settings(deadline=None)
@given(chains, st.integers(1, 9), schedules)
def test_what_ran_in_a_time_is_never_refuted_stage_by_stage(blocks, micro_batches, schedule):
    """Any split of any pipeline under any schedule passes `layers_within_time` for the time that it took."""
    name, ahead = schedule
    time_s = run(blocks, micro_batches, name)
    layers = sum(sum(one["layers"]) for one in blocks)
    assert layers_within_time(limits(blocks, micro_batches, ahead), layers, micro_batches, time_s)


@settings(deadline=None)
@given(chains, st.integers(1, 9), schedules)
def test_what_ran_in_a_time_is_never_refuted_by_arithmetic(blocks, micro_batches, schedule):
    """`max_micro_batches` promises at least as many as really ran, spots in whatever order."""
    name, ahead = schedule
    time_s = run(blocks, micro_batches, name)
    layers = sum(sum(one["layers"]) for one in blocks)
    hops_s = 2 * sum(one["hop_s"] + one["wire_s"] for one in blocks[1:])
    for order in itertools.permutations(parts(blocks)):
        most = max_micro_batches(list(order), layers, time_s, 99, max_ahead=ahead, hops_s=hops_s)
        assert most >= micro_batches


def test_a_bound_that_meets_the_fastest_plan_proves_it_optimal():
    """Not all numbers of replicas of 128 chips are tried, and still the answer is known to be the best."""
    question = SearchRequest(
        job=job(1024), model=llama(*LLAMA2_7B), pool=pool({"a": [("A100", 128)]}, 1, 1), explain=False
    )
    answer = search_plans(question)
    assert answer.optimal
    assert answer.bound_s <= answer.plans[0].predicted.iteration_s <= answer.bound_s * (1 + 2 * OPTIMALITY_GAP)
    stopped = search_plans(replace(question, should_continue=lambda tally, best: best is None))
    assert not stopped.optimal
    assert stopped.bound_s < answer.bound_s


UNLIKE = [
    ({"sliding_window": 512, "head_dim": 128, "model_type": "gemma2"}, "Gemma2ForCausalLM"),
    (
        {"model_type": "deepseek_v2", "moe_intermediate_size": 1024, "n_routed_experts": 8,
         "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 256,
         "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        "DeepseekV2ForCausalLM",
    ),
]  # fmt: skip
"""Models whose layers differ: every other one, or the first."""


def instance(chance):
    """Return a random small pool, some sites with two kinds of chips, and a model.

    Computing takes most of the time, so that bounds are tight and a wrong one shows.
    """
    layers, count = chance.choice([4, 5, 6, 8]), chance.randint(1, 3)
    sizes = {"hidden_size": 2048, "vocab_size": 1000, "num_hidden_layers": layers}
    config = sizes | {"intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 16}
    more, architecture = chance.choice([({}, "LlamaForCausalLM")] * 2 + UNLIKE)
    model = profile_model(
        Model(path="m", architecture=architecture, num_layers=layers, hidden_size=2048,
              vocab_size=1000, config=config | more)
    )  # fmt: skip
    groups = [
        [chance.choice([1, 1, 2, 3, 4]) for _ in range(chance.choice([1, 1, 2]) if count < 3 else 1)]
        for _ in range(count)
    ]
    whole = sum(map(sum, groups)) * chance.uniform(0.2, 1.2)
    gbps, round_trip_ms = 10 ** chance.uniform(1, 3), chance.choice([0, 1, 5, 30])
    jitter_ms = chance.choice([0, 0, 0, 2])
    kinds = [(i, j) for i, one in enumerate(groups) for j, _ in enumerate(one)]
    where = {
        "chips": [
            {
                "name": f"chip{i}{j}",
                "peak_flop_per_s": {"bf16": chance.uniform(2e13, 2e14)},
                "memory_bytes": round(29 * model.num_parameters / whole * chance.uniform(0.7, 1.4)),
                "memory_bandwidth_bytes_per_s": chance.uniform(5e11, 3e12),
                "in_node_link": {"name": "link", "bandwidth_bytes_per_s": chance.choice([1e9, 1e11, 4e11])},
                "power_w": 300,
            }
            for i, j in kinds
        ],
        "clusters": [
            {
                "name": f"site{i}",
                "owner": "o",
                "node_groups": [
                    {"name": f"g{j}", "chip": f"chip{i}{j}", "nodes": 1, "chips_per_node": size}
                    for j, size in enumerate(one)
                ],
            }
            for i, one in enumerate(groups)
        ],
        "links": [
            {"between": [f"site{i}", f"site{j}"], "bandwidth_gbps": gbps * chance.uniform(0.5, 2),
             "round_trip_ms": round_trip_ms, "jitter_ms": jitter_ms}
            for i, j in itertools.combinations(range(count), 2)
        ],
    }  # fmt: skip
    return Pool.model_validate(where), model


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "executable"), [(0, False), (1, False), (2, False), (3, True)])
def test_the_time_of_the_best_of_all_plans_is_never_refuted(seed, executable, whole):
    """Every plan of small spaces is simulated; neither the bound nor any refutation passes the fastest.

    Of 5 spaces a seed, or 20 with `--whole`.
    """
    chance, seen = random.Random(seed), 0
    while seen < (20 if whole else 5):
        where, model = instance(chance)
        samples, length = chance.choice([4, 6, 8, 12]), chance.choice([2048, 4096])
        schedule = chance.choice([None, None, None, "gpipe", "overlapped"])
        limits = SearchLimits(
            max_micro_batch_size=2, zero=chance.choice([0, 1, 2]), schedule=schedule, executable=executable
        )
        task = TrainingWorkload(model, length, "bf16", calibration_for(where))
        space, asked = SearchSpace(task, Routes(where, task.calibration), limits), job(samples, length)
        spots = [s for cluster in where.clusters for s in cluster_slots(where, cluster, asked.placement, None)]
        every = list(itertools.islice(layouts(space, spots, samples), 301)) if len(spots) < 5 else []
        if not 0 < len(every) <= 300:
            continue
        seen += 1
        best_s = min(seconds(one, asked, where, task) for one in every)
        sizes = [Relaxations(space, spots, size, samples // size) for size in space.micro_batch_sizes(1, samples)]
        limits = range(1, 5), spots, samples, best_s * (1 + 1e-7), 1 << 40
        assert not all(Refutation([one], *limits).holds() for one in sizes)
        assert prove_bound(space, spots, samples, 1, best_s, 100_000) <= best_s
