"""Programs of users the whole way: server, two agents, gang start, ranks, metrics, restarts, stop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from isthmus.cli.demo.demo_pool import DemoPool
from isthmus.core.job import Job
from isthmus.core.model import COMMAND_MODEL
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.process.confined_start import MIN_LANDLOCK_ABI, landlock_abi
from isthmus.core.views.api_views import JobView, Submission
from tests.docs.follow_guide import blocks
from tests.e2e.site import all_metrics, clusters_of, running, state_is, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(landlock_abi() < MIN_LANDLOCK_ABI, reason="this kernel has no Landlock"),
]

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "any-program.md"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoPool]:
    """Two owners with two cores each, who admit programs below one folder."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "users").mkdir()
    policy = {"storage": {"roots": [{"path": str(folder / "users")}]}, "workers": {"commands": True}}
    (folder / "policy.yaml").write_text(yaml.safe_dump(policy))
    with running(folder, clusters_of({"north": 2, "south": 2}, 1.0)) as made:
        yield made


def submit(pool: DemoPool, name: str, program: str, **changes: Any) -> tuple[JobView, Path]:
    """Submit a Python program on all four cores; return the job and its folder."""
    place = pool.folder / "users" / name
    place.mkdir()
    (place / "program.py").write_text(program)
    command = {"arguments": [sys.executable, "program.py"], "ranks": {"north": 2, "south": 2}}
    job = {"name": name, "engine": "command", "command": command, "output": str(place), "policy": "auto"} | changes
    return pool.client.submit(Submission(job=Job.model_validate(job), model=COMMAND_MODEL)), place


def log_of(pool: DemoPool, job: str) -> str:
    return "".join(chunk.text for chunk in pool.client.logs(job).chunks)


def test_the_program_of_the_guide_trains_over_two_sites(pool: DemoPool) -> None:
    """Its ranks meet at the master's address, reduce gradients, save the model and report their steps."""
    (program,) = [one.text for one in blocks(GUIDE) if one.language == "python"]
    job, policy = (yaml.safe_load(one.text) for one in blocks(GUIDE) if one.language == "yaml")
    assert OwnerPolicy.model_validate(policy).workers.commands
    assert job["command"].pop("arguments") == ["python", "train.py"]
    command = job["command"] | {"arguments": [sys.executable, "program.py"]}
    view, place = submit(pool, "guide", program, command=command)
    state_is(pool.client, view.id, "succeeded")
    assert (place / "model.pt").exists()
    metrics = wait_until("all steps are known", lambda: len(one := all_metrics(pool.client, view.id)) >= 10 and one)
    assert {(one.rank, one.step) for one in metrics} == {(rank, step) for rank in range(2) for step in range(5)}
    assert all(one.values["loss"] for one in metrics)
    assert [(one.rank, one.cluster, one.node) for one in pool.client.ranks(view.id)] == [
        (0, "north", "cpu/0"),
        (1, "south", "cpu/0"),
    ]


HF_TRAINER = """
import json, os
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

class Progress(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            with open(os.environ["ISTHMUS_PROGRESS"], "a") as stream:
                stream.write(json.dumps({"step": state.global_step, "loss": float(logs["loss"])}) + "\\n")

torch.manual_seed(0)
config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(64, (16, 8))]
arguments = TrainingArguments(
    output_dir="trained", use_cpu=True, per_device_train_batch_size=4 // int(os.environ.get("WORLD_SIZE", 1)),
    max_steps=4, logging_steps=1, learning_rate=0.05, report_to=[], save_strategy="no",
)
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows, callbacks=[Progress()])
trainer.train()
trainer.save_model("trained")
"""


def test_a_hugging_face_trainer_trains_over_two_sites_as_in_one_process(pool: DemoPool) -> None:
    """It reads the variables of torchrun by itself; its losses are those of one process on the same batches."""
    command = {"arguments": [sys.executable, "program.py"], "ranks": {"north": 1, "south": 1}, "steps": 4}
    view, place = submit(pool, "trainer", HF_TRAINER, command=command)
    state_is(pool.client, view.id, "succeeded")
    alone = pool.folder / "alone"
    alone.mkdir()
    environment = os.environ | {"ISTHMUS_PROGRESS": str(alone / "progress")}
    subprocess.run([sys.executable, place / "program.py"], cwd=alone, env=environment, check=True, capture_output=True)
    expected = {one["step"]: one["loss"] for one in map(json.loads, (alone / "progress").read_text().splitlines())}
    found = wait_until("all losses are known", lambda: len(one := all_metrics(pool.client, view.id)) == 8 and one)
    for rank in range(2):
        losses = {one.step: one.values["loss"] for one in found if one.rank == rank}
        assert losses == pytest.approx(expected, rel=1e-6)
    assert (place / "trained" / "model.safetensors").exists()


def test_a_failed_rank_restarts_all_ranks(pool: DemoPool) -> None:
    """The first attempt of rank 3 fails while the others wait; the second attempt starts with all four again."""
    program = (
        "import os, sys, time\n"
        "names = ('ISTHMUS_ATTEMPT', 'RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'ISTHMUS_CLUSTER')\n"
        "print('attempt', *map(os.environ.get, names), flush=True)\n"
        "if os.environ['ISTHMUS_ATTEMPT'] == '1':\n"
        "    sys.exit(7) if os.environ['RANK'] == '3' else time.sleep(1000)\n"
    )
    view, _ = submit(pool, "again", program)
    done = state_is(pool.client, view.id, "succeeded")
    assert (done.attempt, done.restarts) == (2, 1)
    log = wait_until("all logs are stored", lambda: (text := log_of(pool, view.id)).count("attempt 2") == 4 and text)
    assert "error: the command ended with status 7" in log
    assert sorted(line for line in log.splitlines() if line.startswith("attempt 2")) == [
        "attempt 2 0 0 2 north", "attempt 2 1 1 2 north", "attempt 2 2 0 2 south", "attempt 2 3 1 2 south",
    ]  # fmt: skip


def test_a_program_that_cannot_start_fails_without_a_restart(pool: DemoPool) -> None:
    """The reason reaches the user."""
    command = {"arguments": ["./missing"], "ranks": {"north": 1}}
    view, _ = submit(pool, "missing", "", command=command)
    done = state_is(pool.client, view.id, "failed")
    assert done.restarts == 0
    assert "cannot start './missing'" in done.reason


def test_a_program_is_held_to_its_users_folders_and_ends_when_cancelled(pool: DemoPool) -> None:
    """It reads neither the state of the agent nor writes beside its root; its daemons end with it."""
    program = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "parent = os.path.dirname(os.path.dirname(os.environ['ISTHMUS_PROGRESS']))\n"
        f"for path in ({str(pool.folder)!r}, '/root', parent):\n"
        "    try:\n"
        "        open(os.path.join(path, 'x'), 'w'); print('wrote', path)\n"
        "    except OSError as error:\n"
        "        print(type(error).__name__)\n"
        "try:\n"
        f"    print(os.listdir({str(pool.folder)!r}))\n"
        "except OSError as error:\n"
        "    print('listing', type(error).__name__)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1234.5)'], start_new_session=True)\n"
        "print('ready', flush=True)\n"
        "time.sleep(1000)\n"
    )
    command = {"arguments": [sys.executable, "program.py"], "ranks": {"south": 1}}
    view, _ = submit(pool, "hostile", program, command=command)
    log = wait_until("the program is ready", lambda: "ready" in (text := log_of(pool, view.id)) and text)
    assert "wrote" not in log
    assert "listing PermissionError" in log
    assert any("time.sleep(1234.5)" in one for one in command_lines())
    pool.client.cancel(view.id)
    state_is(pool.client, view.id, "cancelled")
    assert not any("time.sleep(1234.5)" in one for one in command_lines())


def command_lines() -> list[str]:
    return [" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])]
