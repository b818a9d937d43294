"""Part `local` of `benchmarks.parallel`: local SGD between two sites on virtual chips, beside what was predicted."""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._real_pipeline import emulated
from benchmarks._virtual_run import run_workers
from benchmarks.table import Row, compared
from isthmus.core.model import load_model
from isthmus.core.plan import Plan, StageTime
from isthmus.core.pool import Pool
from isthmus.plan import predict, profile_model
from isthmus.plan.time.calibration import DATA_SHEET
from isthmus.plan.time.plan_links import simulated_links
from isthmus.plan.time.stage_costs import stage_costs

EVERY = 4
GBPS, DELAY_MS = 1.0, 25.0
"""The link between the sites, in each direction."""

_LAYERS = 4
_MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 8192, "hidden_size": 512,
    "intermediate_size": 1408, "num_hidden_layers": _LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip


def measure(quick: bool) -> list[Row]:
    """Return rows of the mean step of whole rounds, beside its prediction and a run that sums gradients each step."""
    rounds = 2 if quick else 5
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(_MODEL), encoding="utf-8")
        local, predicted_s = _step(Path(folder) / "local", config, EVERY, rounds)
        every, every_predicted_s = _step(Path(folder) / "every", config, 1, rounds)
    what = f"local steps, 2 sites, {GBPS:g} Gbit/s, {2 * DELAY_MS:g} ms round trip"
    error = abs(local["step_s"] / predicted_s - 1)
    return [
        compared(
            f"{what}: a step of {EVERY} between averages", 1e3 * local["step_s"], "ms", "predicted", 1e3 * predicted_s,
            target="within 5 %", met=error <= 0.05,
        ),
        compared(
            f"{what}: the same, gradients summed each step", 1e3 * every["step_s"], "ms", "predicted",
            1e3 * every_predicted_s, target="within 5 %", met=abs(every["step_s"] / every_predicted_s - 1) <= 0.05,
        ),
        compared(
            f"{what}: bytes between the sites a step", local["wan_bytes"], "bytes", "summed each step",
            every["wan_bytes"], target=f"1/{EVERY}", met=local["wan_bytes"] * EVERY == every["wan_bytes"],
        ),
    ]  # fmt: skip


def _step(folder: Path, config: Path, every: int, rounds: int) -> tuple[dict[str, float], float]:
    """Return seconds and bytes of a mean step of all rounds but the first, and the predicted seconds."""
    plan, pool = _plan(every), _pool()
    profile = profile_model(load_model(str(config)))
    costs = [stage_costs(plan, pool, profile, DATA_SHEET, replica)[0].load for replica in range(plan.dp)]
    times = [StageTime(forward_s=one.forward_s, backward_s=one.backward_s, update_s=one.update_s) for one in costs]
    wires = simulated_links(plan, pool, DATA_SHEET)
    links = [
        one.model_copy(update={"bandwidth_gbps": wires[one.source, one.target].bytes_per_s * 8e-9})
        for one in pool.links
    ]
    routes = folder / "routes"
    routes.mkdir(parents=True)
    with emulated(pool.model_copy(update={"links": tuple(links)}), routes) as found:
        virtual = plan.model_copy(update={"compute": "virtual"})
        ranks = run_workers(virtual, times, config, folder, found, EVERY * rounds)
    steps = list(zip(*(one[EVERY:] for one in ranks), strict=True))
    mean = {
        "step_s": statistics.fmean(max(one.values["step_s"] or 0.0 for one in step) for step in steps),
        "wan_bytes": statistics.fmean(sum(one.values["wan_bytes"] or 0.0 for one in step) for step in steps),
    }
    return mean, predict(plan, pool, profile).iteration_s


def _plan(every: int) -> Plan:
    return Plan.model_validate(
        {
            "id": "local",
            "stages": [
                {"replica": replica, "cluster": name, "node_group": "h20", "layers": (0, _LAYERS)}
                for replica, name in enumerate("ab")
            ],
            "dp": 2, "micro_batches": 16, "micro_batch_size": 4, "sequence_length": 8192, "local_steps": every,
        }
    )  # fmt: skip


def _pool() -> Pool:
    group: dict[str, Any] = {"name": "h20", "chip": "H20", "nodes": 1, "chips_per_node": 8}
    ends = {"bandwidth_gbps": GBPS, "delay_ms": DELAY_MS}
    return Pool.model_validate(
        {
            "clusters": [{"name": name, "owner": name, "node_groups": [group]} for name in "ab"],
            "links": [{"from": "a", "to": "b", **ends}, {"from": "b", "to": "a", **ends}],
        }
    )
