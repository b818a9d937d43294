"""Rules of the worker: real processes train as one would, resume, and end cleanly whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from isthmus.core.errors import InputError, ModelError, PeerError, PlanError
from isthmus.core.job import DataConfig, Job
from isthmus.core.messages.agent_messages import VerifiedCheckpoint
from isthmus.core.messages.worker_folder import CheckpointRequest, WorkerSpec
from isthmus.core.plan import Plan
from isthmus.train.liveness.worker_events import read_events
from isthmus.train.process.check_plan_supported import check_plan_supported
from isthmus.train.process.verify import verify
from isthmus.wan import links_in_background
from tests.comm.relay import Relay
from tests.data.corpora import conversation, write_lines, write_tokenizer
from tests.schedule.wan_orders import wan_orders
from tests.train.small_models import save_model, write_config
from tests.train.worker_jobs import LIMIT_S, Workers, make_job, make_plan, run_job, started, whole
from tests.wan.lab import pool_of

STEPS = 20


def moved(job: Job, folder: Path) -> Job:
    """Return the job with checkpoints and output of its own."""
    checkpoints = job.checkpoints.model_copy(update={"folder": str(folder / "checkpoints")})
    return job.model_copy(update={"checkpoints": checkpoints, "output": str(folder / "output")})


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "searched"])
def test_clusters_train_what_one_process_trains(tmp_path: Path, schedule: str, request: pytest.FixtureRequest) -> None:
    """Uneven stages in two clusters give the loss of one process to 1e-4, also killed and resumed otherwise.

    Under 1F1B; with `--whole` under searched orders too, which the next two tests run undisturbed.

    1. One process trains 20 steps. 2. Three stages, joined through a proxy, train until the last is killed.
    3. The others end as its connection ends, long before it counts as silent, and name it. 4. Two stages go on
    from the newest checkpoint to the end. 5. The result opens in transformers with the held-out loss that was
    reported.
    """
    training = {"evaluate_every": 10}
    if schedule != "1f1b" and not request.config.getoption("--whole"):
        pytest.skip("one of the schedules that --whole kills and resumes")
    job = make_job(tmp_path, "llama-tied", steps=STEPS, training=training, checkpoints={"every_steps": 6})
    alone = run_job(tmp_path / "alone", moved(job, tmp_path / "alone"), whole(job))
    cut = moved(job, tmp_path / "cut")

    def plan(ends: list[int], clusters: str) -> Plan:
        orders = [{"stages": wan_orders(len(ends), job.training.num_micro_batches)}] if schedule == "searched" else []
        return make_plan(job, ends, clusters, schedule=schedule, orders=orders)

    with Relay() as relay:
        routes = {"routes": dict.fromkeys("ab", relay.address)}
        with started(tmp_path / "cut", cut, plan([1, 3, 4], "aab"), **routes) as first:
            first.wait_for_step(8)
            os.kill(first.processes[2].pid, signal.SIGKILL)
            lost = PeerError.exit_code
            assert first.wait() == [lost, lost, -signal.SIGKILL]
        assert relay.num_carried > 0
    for rank in (0, 1):
        assert first.log(rank).splitlines()[-1].startswith("error: PeerError: ")
        assert "peer 2 " in first.log(rank)
        assert "silent" not in first.log(rank)
    done = len(first.losses())
    second = run_job(tmp_path / "cut", cut, plan([3, 4], "ab"), attempt=2)
    resumed = STEPS - len(second.losses())
    assert resumed % 6 == 0
    assert 6 <= resumed <= done
    assert first.losses() == pytest.approx(alone.losses()[:done], rel=1e-4)
    assert second.losses() == pytest.approx(alone.losses()[resumed:], rel=1e-4)
    assert alone.losses()[-1] < alone.losses()[0]
    assert verify(cut)["loss"] == pytest.approx(second.losses("validation_loss")[-1], rel=1e-4)
    assert list((tmp_path / "cut/checkpoints/tensorboard").glob("events*"))


@pytest.mark.slow
def test_a_searched_schedule_trains_over_a_wan_delay(tmp_path: Path) -> None:
    """Orders made for a delay of three forwards, over a link that has it: the losses of one process, delay included."""
    job = make_job(tmp_path, "llama-tied", steps=4, training={"global_batch_size": 12})
    alone = run_job(tmp_path / "alone", moved(job, tmp_path / "alone"), whole(job))
    orders = [{"stages": wan_orders(3, job.training.num_micro_batches)}]
    plan = make_plan(job, [1, 3, 4], "aab", schedule="searched", orders=orders)
    times = {"stage_time": {"forward_s": 0.01, "backward_s": 0.02}}
    with links_in_background(pool_of({"between": ["a", "b"], "bandwidth_gbps": 1, "round_trip_ms": 60})) as links:
        routes = {"b": links.routes["a"]["b"], "a": links.routes["b"]["a"]}
        far = run_job(tmp_path / "far", moved(job, tmp_path / "far"), plan, routes=routes, **times)
        carried = [link["bytes"] for link in links.statistics()]
    assert far.losses() == pytest.approx(alone.losses(), rel=1e-6)
    tokens = job.training.steps * job.training.global_batch_size * job.training.sequence_length
    assert len(carried) == 2
    assert min(carried) > tokens * 4  # a hidden state, or its gradient, of each token in fp32
    assert all(one.values["step_s"] > 0.06 + 6 * 0.03 for one in far.metrics(0))


@pytest.mark.slow
def test_a_moe_in_bf16_trains_on_plain_gloo(tmp_path: Path) -> None:
    """In one cluster torch's own gloo serves as well; the export is bf16; the figures of a step add up."""
    job = make_job(tmp_path, "mixtral", steps=4, training={"precision": "bf16"}, task="pretrain")
    times = {"stage_time": {"forward_s": 0.01, "backward_s": 0.02}}
    workers = run_job(
        tmp_path,
        job,
        make_plan(job, [2, 4], "aa", schedule="gpipe"),
        backend="gloo",
        trace_steps=(2,),
        **times,
    )
    assert workers.losses()[-1] < workers.losses()[0]
    assert workers.log(0).startswith("rank 0: layers 0 to 1 in cluster a, on a virtual chip: forward 10.0 ms")
    assert "step 4 of 4: loss" in workers.log(1)
    model = AutoModelForCausalLM.from_pretrained(job.output)
    assert str(model.dtype) == "torch.bfloat16"
    for rank in (0, 1):
        steps = workers.metrics(rank)
        assert [one.step for one in steps] == [0, 1, 2, 3]
        assert [bool(one.spans) for one in steps] == [False, False, True, False]
        for one in steps[1:]:
            values = one.values
            parts = values["compute_s"] + values["exposed_communication_s"] + values["idle_s"]
            assert values["compute_s"] >= 4 * 0.03
            assert 0.5 * values["step_s"] < parts < 1.01 * values["step_s"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fixed",
    [{"schedule": "interleaved"}, {"schedule": "overlapped", "warm_up": (3, 0)}, {"schedule": "searched"}],
)
def test_schedules_of_a_plan_are_followed(tmp_path: Path, fixed: dict) -> None:
    """Two pieces per worker, a warm-up or an order of the plan's own: loss, evaluation and result of one process."""
    job = make_job(tmp_path, "llama-tied", steps=4, training={"evaluate_every": 2, "global_batch_size": 12})
    alone = run_job(tmp_path / "alone", moved(job, tmp_path / "alone"), whole(job))
    cut = moved(job, tmp_path / "cut")
    if fixed["schedule"] == "searched":
        fixed = fixed | {"orders": [{"stages": wan_orders(2, job.training.num_micro_batches)}]}
    plan = Plan.model_validate(make_plan(job, [2, 4], "ab").model_dump() | fixed)
    workers = run_job(tmp_path / "cut", cut, plan)
    if fixed["schedule"] == "interleaved":
        assert workers.log(0).startswith("rank 0: layers 0 to 0 and 2 to 2 in cluster a")
    assert workers.losses() == pytest.approx(alone.losses(), rel=1e-6)
    assert workers.losses("validation_loss") == pytest.approx(alone.losses("validation_loss"), rel=1e-6)
    assert verify(cut)["loss"] == pytest.approx(workers.losses("validation_loss")[-1], rel=1e-4)


@pytest.mark.slow
def test_a_chat_model_is_tuned_with_its_own_tokenizer_and_exported_with_it(tmp_path: Path) -> None:
    """Without `data.tokenizer` the model's own is used; the log names it and the template; the result carries both."""
    job = make_job(tmp_path, steps=2, training={"sequence_length": 32, "global_batch_size": 2})
    line = conversation("hello world", "the capital of Gansu is Lanzhou")
    chats = write_lines(tmp_path / "chats.jsonl", [line] * 40)
    template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    settings = {"chat_template": template, "eos_token": "</s>"}
    write_tokenizer(Path(job.model), specials=["</s>"], settings=settings, vocab_size=272)
    save_model(Path(job.model), "llama", vocab_size=272, pad_token_id=None)
    data = DataConfig(paths=(chats,))
    job = job.model_copy(update={"task": "finetune", "data": data})
    workers = run_job(tmp_path, job, whole(job))
    assert f"tokenizer {job.model}/tokenizer.json: 272 tokens" in workers.log(0)
    assert f"chat template of {job.model}/tokenizer_config.json: {len(template)} characters, sha256" in workers.log(0)
    loaded = AutoTokenizer.from_pretrained(job.output)
    ids = loaded.apply_chat_template(line["messages"], tokenize=True, return_dict=False)
    own = AutoTokenizer.from_pretrained(job.model)
    assert ids == own.apply_chat_template(line["messages"], tokenize=True, return_dict=False)
    assert ids[-1] == own.eos_token_id
    assert verify(job)["loss"] > 0


@pytest.mark.slow
def test_sigterm_ends_a_worker_at_once(tmp_path: Path) -> None:
    """SIGTERM ends a worker with 143, whatever it does; the others follow with `PeerError`."""
    job = make_job(tmp_path, steps=100_000)
    with started(tmp_path, job, make_plan(job, [2, 4], "aa")) as workers:
        workers.wait_for_step(2)
        os.kill(workers.processes[0].pid, signal.SIGTERM)
        assert workers.wait() == [143, PeerError.exit_code]
        assert "silent" not in workers.log(1)


@pytest.mark.slow
def test_a_worker_that_cannot_start_says_why_in_one_line(tmp_path: Path) -> None:
    """Missing data, and a rank that does not come, end the worker with one line and the error's status."""
    job = make_job(tmp_path)
    missing = job.model_copy(update={"data": job.data.model_copy(update={"paths": ("/nowhere/at/all",)})})
    for place, broken, status, words in (("data", missing, 2, "DataError"), ("ranks", job, 9, "PeerError")):
        plan = make_plan(job, [1, 4]) if place == "ranks" else whole(job)
        with started(tmp_path / place, broken, plan, rendezvous_timeout_s=0.5) as workers:
            for other in workers.processes[1:]:
                os.kill(other.pid, signal.SIGKILL)
            assert workers.wait()[0] == status
        assert words in workers.log(0)
        assert len(workers.log(0).splitlines()) == 1


@pytest.mark.slow
def test_a_worker_without_a_folder_says_what_it_needs() -> None:
    """Started as an agent does it, with warnings as errors; the other tests fork workers."""
    command = [sys.executable, "-W", "error", "-m", "isthmus.train.process.worker"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == InputError.exit_code
    assert "one argument is needed" in done.stderr


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    """In bf16, with balanced experts and recomputation: killed and resumed, each loss is that of one run.

    Rank 0 records from which step training continues, and every checkpoint, for the history of the job.

    1. Two stages train all steps. 2. The same again, killed behind the second checkpoint. 3. It goes on.
    """
    training, checkpoints = {"precision": "bf16"}, {"every_steps": 2}
    job = make_job(tmp_path, "mixtral", steps=9, training=training, checkpoints=checkpoints)
    config = tmp_path / "model/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"output_router_logits": True}))
    whole_run, cut = moved(job, tmp_path / "whole"), moved(job, tmp_path / "cut")
    plan = make_plan(job, [1, 4], "ab", stage={"recompute": "full"})
    straight = run_job(tmp_path / "whole", whole_run, plan)
    with started(tmp_path / "cut", cut, plan) as first:
        first.wait_for_step(4)
        os.kill(first.processes[0].pid, signal.SIGKILL)
        first.wait()
    second = run_job(tmp_path / "cut", cut, plan, attempt=2)
    done = 9 - len(second.losses())
    assert done >= 4
    assert first.losses() + second.losses()[len(first.losses()) - done :] == straight.losses()
    assert second.losses() == straight.losses()[done:]
    assert second.losses("balance_loss") == straight.losses("balance_loss")[done:]
    told = [(event.kind, event.step) for event in read_events(second.folders[0])]
    assert told[0] == ("resumed", done)
    assert ("saved", 9) in told
    assert [one for one in read_events(second.folders[1]) if one.kind in ("resumed", "saved")] == []


@pytest.mark.slow
def test_a_run_that_one_site_protects_is_saved_at_one_step_by_all(tmp_path: Path) -> None:
    """One rank is asked; all save after one step, read it back and train on; a killed run begins from there.

    A second request, later, gets a newer checkpoint.
    """
    job = make_job(tmp_path, steps=2000)
    plan = make_plan(job, [1, 4], "ab")
    with started(tmp_path, job, plan) as first:
        first.wait_for_step(1)
        found = _protected(first, after=0)
        assert found[0].step == found[1].step > 1
        assert all(one.num_bytes > 0 for one in found)
        again = _protected(first, after=found[0].step)
        assert again[0].step == again[1].step > found[0].step
        os.kill(first.processes[0].pid, signal.SIGKILL)
        first.wait()
    with started(tmp_path, job, plan, attempt=2) as second:
        second.wait_for_step(again[0].step)
        assert second.metrics(0)[0].step == again[0].step, "it goes on where it was protected"


def _protected(workers: Workers, after: int) -> list[VerifiedCheckpoint]:
    """Ask the last rank for a checkpoint later than `after` steps; return what all ranks say of it."""
    workers.folders[-1].write_checkpoint_request(CheckpointRequest(after=after))
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        found = [folder.read_verified_checkpoint() for folder in workers.folders]
        known = [one for one in found if one is not None and one.step > after]
        if len(known) == len(found):
            return known
        assert time.monotonic() < deadline_s, workers.log(0)
        time.sleep(0.02)


@pytest.mark.slow
def test_a_run_that_has_lost_its_numbers_ends(tmp_path: Path) -> None:
    """Where no update is finite any more the run ends with one line; the metrics say which were skipped."""
    job = make_job(tmp_path, steps=60, training={"learning_rate": 1e30, "warmup_steps": 0})
    with started(tmp_path, job, whole(job)) as workers:
        assert workers.wait() == [InputError.exit_code]
    assert "not finite in 10 consecutive steps" in workers.log(0).splitlines()[-1]
    skipped = [one.values["update_skipped"] for one in workers.metrics(0)]
    assert skipped[0] == 0.0
    assert skipped[-10:] == [1.0] * 10
    assert workers.metrics(0)[-1].values["loss"] is None
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def spec_of(tmp_path: Path, plan: Plan | None = None, **changes: object) -> WorkerSpec:
    """Return the spec of rank 0 of a two-stage plan, or of `plan`."""
    job = make_job(tmp_path)
    plan = plan or make_plan(job, [1, 4])
    return WorkerSpec.model_validate({"run": "j", "attempt": 1, "rank": 0, "job": job, "plan": plan, **changes})


def test_a_plan_that_fits_is_accepted(tmp_path: Path) -> None:
    """What the runtime can run passes, with its schedule."""
    assert check_plan_supported(spec_of(tmp_path)).num_stages == 2


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"stage": {"recompute": "full", "recompute_layers": 9}}, "9 recomputed layers of"),
        ({"stage": {"cp": 3}}, "cp 3, which does not divide 16 tokens.*nearest valid: cp 2"),
        ({"stage": {"cp": 2, "recompute": "selective"}}, "selective recomputation"),
        ({"stage": {"ep": 2}}, "ep 2, which does not divide the 1 chips .*nearest valid: ep 1"),
        ({"stage": {"sp": True}}, "sequence parallelism"),
        ({"schedule": "unheard-of"}, "unknown schedule 'unheard-of'"),
        ({"schedule": "interleaved", "chunks": 2}, "one of them empty"),
    ],
)  # fmt: skip
def test_what_the_runtime_cannot_run_is_refused(tmp_path: Path, changes: dict, why: str) -> None:
    """Each refusal is a `PlanError` that says what cannot be run."""
    plan = make_plan(make_job(tmp_path), [1, 4], **changes)
    with pytest.raises(PlanError, match=why):
        check_plan_supported(spec_of(tmp_path, plan))


@pytest.mark.parametrize(
    "fixed",
    [
        {"warm_up": (1, 0)}, {"transport": "rendezvous"}, {"precision": "fp16"}, {"chunks": 2},
    ],
)  # fmt: skip
def test_what_a_plan_by_hand_fixes_is_followed_or_refused(tmp_path: Path, fixed: dict) -> None:
    """Nothing that a plan may say is ignored in silence."""
    plan = make_plan(make_job(tmp_path), [1, 4]).model_copy(update=fixed)
    with pytest.raises(PlanError, match=next(iter(fixed)) if "transport" not in fixed else "rendezvous"):
        check_plan_supported(spec_of(tmp_path, plan))


def test_a_plan_of_another_job_is_refused(tmp_path: Path) -> None:
    """Samples, sequence length, layers and replicas must be those of the job."""
    plan = make_plan(make_job(tmp_path), [1, 4])
    doubled = [one for replica in (0, 1) for one in (s.model_copy(update={"replica": replica}) for s in plan.stages)]
    apart = [s.model_copy(update={"cluster": f"site-{s.replica}"}) for s in doubled]
    for update, why in (
        ({"micro_batches": 5}, "samples a step is 10 in the plan and 8 in the job"),
        ({"sequence_length": 99}, "sequence_length is 99"),
        ({"stages": plan.stages[:1]}, "number of layers is 1"),
        ({"stages": tuple(doubled), "dp": 2}, "samples a step is 16"),
        ({"stages": tuple(apart), "dp": 2, "local_steps": 4, "micro_batches": 2}, "local_steps is 4 in the plan"),
        (
            {"model": str(write_config(tmp_path / "other", "qwen3"))},
            f"model is {tmp_path}/other.* in the plan",
        ),
    ):
        with pytest.raises(PlanError, match=why):
            check_plan_supported(spec_of(tmp_path, Plan.model_validate(plan.model_dump() | update)))


def test_a_backend_that_cannot_serve_is_refused(tmp_path: Path) -> None:
    """A backend that this torch lacks, and gloo across clusters, are refused with what to use instead."""
    for absent in ("hccl", "mpi"):
        with pytest.raises(PlanError, match=f"'{absent}' is not supported.*supported here: isthmus, gloo"):
            check_plan_supported(spec_of(tmp_path, backend=absent))
    with pytest.raises(PlanError, match=r"'nccl' is not supported.*isthmus, gloo\)"):
        check_plan_supported(spec_of(tmp_path, backend="nccl", device="cpu"))
    with pytest.raises(PlanError, match="does not support routes"):
        check_plan_supported(spec_of(tmp_path, backend="gloo"))


@pytest.mark.parametrize("name", ["attention_dropout", "router_jitter_noise"])
def test_chance_in_the_forward_is_refused(tmp_path: Path, name: str) -> None:
    """What draws at random in every forward would make the result depend on the cut: not run, and said so."""
    spec = spec_of(tmp_path)
    file = tmp_path / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: 0.1}))
    with pytest.raises(ModelError, match=f"{name} is 0.1"):
        check_plan_supported(spec)


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    """The model must be readable where the worker runs."""
    spec = spec_of(tmp_path)
    (tmp_path / "model/config.json").unlink()
    with pytest.raises(ModelError, match="no model at"):
        check_plan_supported(spec)
