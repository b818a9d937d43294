"""Rules of a run with `task: rl`: real processes train on their own responses as one would."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM

from isthmus.rl.rollout.read_ledger import read_ledger
from isthmus.wan.background_emulator import links_in_background
from tests.rl.rl_jobs import PROGRAM, make_rl_job
from tests.train.worker_jobs import make_plan, run_job, started, whole
from tests.wan.lab import pool_of

pytestmark = pytest.mark.slow


def test_one_process_and_any_plan_learn_the_same(tmp_path: Path) -> None:
    """A pipeline over two clusters, and tensor parallelism, give the losses and rewards of one process to 1e-4.

    The metrics of a step say what its samples were, and the model opens in transformers.
    """
    job = make_rl_job(tmp_path, training={"evaluate_every": 3})
    alone = run_job(tmp_path / "alone", job, whole(job), program=PROGRAM)
    assert AutoModelForCausalLM.from_pretrained(job.output).config.vocab_size == 272
    last = alone.metrics(0)[-1].values
    assert last["staleness"] == 0
    assert last["kl_rollout"] == pytest.approx(0, abs=1e-9)
    assert last["entropy"] == pytest.approx(5.6, abs=0.1)
    assert 0 <= last["validation_reward"] <= 1
    for name, plan in {
        "two": make_plan(job, [1, 4], "ba"),
        "tensor": make_plan(job, [4], "a", stage={"tp": 2}),
    }.items():
        folder = tmp_path / name
        moved = job.model_copy(
            update={
                "output": str(folder / "output"),
                "checkpoints": job.checkpoints.model_copy(update={"folder": str(folder / "checkpoints")}),
            }
        )
        found = run_job(folder, moved, plan, program=PROGRAM)
        ranks = [found.metrics(rank) for rank in range(len(plan.ranks))]
        reward = [one.values["reward"] for of_rank in ranks for one in of_rank if "reward" in one.values]
        assert reward == pytest.approx([one.values["reward"] for one in alone.metrics(0)], abs=1e-4), name
        losses = [one.values["loss"] for of_rank in ranks for one in of_rank if "loss" in one.values]
        assert losses == pytest.approx(alone.losses(), abs=1e-4), name


def test_a_killed_run_goes_on_with_its_samples(tmp_path: Path) -> None:
    """An attempt killed in the middle: the next one goes on with the same samples, and the same curve bit for bit.

    Its reference model is again the job's, not that of the checkpoint.
    """
    passes = {"kl": 0.2, "old": "recomputed"}
    job = make_rl_job(tmp_path, steps=6, checkpoints={"every_steps": 2}, rl=passes)
    alone = run_job(tmp_path / "alone", job, whole(job), program=PROGRAM)
    cut = make_rl_job(tmp_path / "cut", steps=6, checkpoints={"every_steps": 2}, rl=passes)
    with started(tmp_path / "cut", cut, whole(cut), program=PROGRAM) as first:
        first.wait_for_step(4)
        os.kill(first.processes[0].pid, signal.SIGKILL)
        first.wait()
    second = run_job(tmp_path / "cut", cut, whole(cut), attempt=2, program=PROGRAM)
    resumed = 6 - len(second.losses())
    assert 1 <= resumed <= 5, second.log(0)
    assert second.losses() == alone.losses()[resumed:]


def test_three_owners_learn_bit_for_bit_what_one_process_learns(tmp_path: Path) -> None:
    """Training at one site, rollouts at two others, one of which is killed in the middle: same tokens, same curve.

    Weights go down encrypted links and trajectories come up; the ledger has lost and doubled nothing, and of the link
    to the site that lived it has the bytes that the link counted.
    """
    job = make_rl_job(tmp_path, steps=4)
    alone = run_job(tmp_path / "alone", job, whole(job), program=PROGRAM)
    apart = make_rl_job(tmp_path / "apart", steps=4)
    rollouts = [{"cluster": name, "node_group": "cpu"} for name in "bc"]
    plan = make_plan(apart, [4], "a", rollouts=rollouts)
    links_of_a = [{"between": ["a", name], "bandwidth_gbps": 1, "round_trip_ms": 2} for name in "bc"]
    with (
        links_in_background(pool_of(*links_of_a)) as links,
        started(tmp_path / "apart", apart, plan, program=PROGRAM, routes=links.routes["a"]) as workers,
    ):
        workers.wait_for_step(0)
        children = psutil.Process(workers.processes[2].pid).children()
        children[0].kill()
        statuses = workers.wait()
        carried = {(one["from"], one["to"]): one["bytes"] for one in links.statistics()}
    assert statuses == [0, 0, 0], "\n".join(workers.log(rank) for rank in range(3))
    losses = [one.values["loss"] for one in workers.metrics(0)]
    assert losses == alone.losses(), workers.log(0)
    found = [read_ledger(Path(one.checkpoints.folder) / "rollouts") for one in (job, apart)]
    assert [(one.lost, one.doubled) for one in found] == [(0, 0)] * 2
    assert found[0].samples == found[1].samples
    assert "b" in found[1].tokens  # c may have died before it reported any
    assert set(found[1].tokens) <= {"b", "c"}
    counted = found[1].bytes["b"]
    assert (counted["sent_bytes"], counted["received_bytes"]) == (carried["a", "b"], carried["b", "a"])
    decoded = [one.values["decoded_tokens"] for one in workers.metrics(1)]
    assert sum(decoded) >= sum(found[1].tokens["b"].values())
    assert all(one.values["decode_s"] > 0 for one in workers.metrics(1)[-1:])


def test_links_that_were_cut_carry_samples_again_within_5_s(tmp_path: Path, whole: bool) -> None:
    """Both links of the trainer stall and refuse connections; once they are back, two more steps take at most 5 s.

    Weights go to c over b, and the bytes of that link are in the ledger too.
    """
    job = make_rl_job(tmp_path, steps=4000)
    rollouts = [{"cluster": "b", "node_group": "cpu"}, {"cluster": "c", "node_group": "cpu", "sources": ["b"]}]
    plan = make_plan(job, [4], "a", rollouts=rollouts)
    joined = [{"between": [*ends], "bandwidth_gbps": 1, "round_trip_ms": 2} for ends in ("ab", "ac", "bc")]
    with (
        links_in_background(pool_of(*joined)) as links,
        started(tmp_path, job, plan, program=PROGRAM, routes_of=links.routes) as workers,
    ):
        workers.wait_for_step(1)
        for name in "bc":
            links.cut("a", name)
        threading.Event().wait(30.0 if whole else 7.0)
        before = workers.metrics(0)[-1].step
        for name in "bc":
            links.restore("a", name)
        workers.wait_for_step(before + 2, limit_s=5.0)
        ends_s = time.monotonic() + 60
        while "b>c" not in (found := read_ledger(Path(job.checkpoints.folder) / "rollouts")).bytes:
            assert time.monotonic() < ends_s, workers.log(2)
            workers.wait_for_step(workers.metrics(0)[-1].step + 1)
        carried = {(one["from"], one["to"]): one["bytes"] for one in links.statistics()}
    assert (found.lost, found.doubled) == (0, 0)
    assert 0 < found.bytes["b>c"]["sent_bytes"] <= carried["b", "c"]


def test_a_site_with_another_model_is_named_and_the_other_decodes(tmp_path: Path) -> None:
    """Its configuration differs, not its sizes: nothing of it is trained on."""
    jobs = [make_rl_job(tmp_path / name, steps=2) for name in "abc"]
    config = Path(jobs[2].model) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 1e-3}))
    plan = make_plan(jobs[0], [4], "a", rollouts=[{"cluster": name, "node_group": "cpu"} for name in "bc"])
    workers = run_job(tmp_path / "run", jobs, plan, program=PROGRAM)
    assert "c decodes nothing" in workers.log(0)
    assert "another model" in workers.log(0)
    assert set(read_ledger(Path(jobs[0].checkpoints.folder) / "rollouts").tokens) == {"b"}
