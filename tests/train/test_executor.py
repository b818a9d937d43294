"""Rules of the executor: however the model is cut and scheduled, it trains as one process does."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from isthmus.comm.group.group_work import SendWork
from isthmus.core.job import TrainingConfig
from isthmus.core.plan import StageTime
from isthmus.schedule import forward_only, gpipe
from isthmus.train.communication.communicator import Communicator, TensorMessage
from isthmus.train.communication.step_metrics import StepTimer
from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.model.recompute import RecomputeKind, RecomputePolicy
from isthmus.train.model.stage_model import EMBEDDING_WEIGHT, build_stage
from isthmus.train.pipeline.micro_batches import MicroBatches
from isthmus.train.pipeline.stage_executor import StageExecutor
from tests.train.devices import needs_gpu, on_devices
from tests.train.small_models import save_model, write_config
from tests.train.threads import Pipeline, random_batch

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]

STEPS = 20


def make_training(**changes: object) -> TrainingConfig:
    """Return hyper-parameters for a model of a few thousand parameters."""
    fields = {
        "steps": STEPS, "sequence_length": 8, "micro_batch_size": 2, "global_batch_size": 8,
        "learning_rate": 1e-2, "warmup_steps": 3, "precision": "fp32", "clip_norm": 0.5,
    }  # fmt: skip
    return TrainingConfig.model_validate(fields | changes)


def losses(
    model: Path,
    ends: list[int],
    training: TrainingConfig,
    schedule: str = "1f1b",
    steps: int | None = None,
    **options: object,
) -> list[float]:
    """Train a pipeline for all its steps, or the first of them, and return the curve."""
    pipeline = Pipeline(model, ends, training, **options)
    try:
        return pipeline.train(steps or training.steps, schedule=schedule)
    finally:
        pipeline.close()


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("variant", ["llama-tied", "qwen3", "mixtral", "qwen3-moe-tied-sparse"])
def test_any_cut_gives_the_curve_of_one_process(variant: str, device: str, whole: bool, tmp_path: Path) -> None:
    """Two to four stages, even and uneven: the same loss at every step, to 1e-6.

    Here under 1F1B and over 8 of the 20 steps; under each other schedule and over all steps on a card, or if asked, as
    `test_long_curves.py` has them on a CPU.
    """
    model, training = write_config(tmp_path, variant), make_training()
    how = {"device": device, "steps": STEPS if whole or device != "cpu" else 8}
    alone = losses(model, [4], training, **how)
    assert alone[-1] < alone[0]
    cuts = [([2, 4], "1f1b"), ([1, 2, 4], "1f1b")]
    if whole or device != "cpu":
        cuts += [([3, 4], "gpipe"), ([1, 2, 4], "overlapped"), ([1, 2, 4], "zero_bubble")]
    for ends, schedule in cuts:
        found = losses(model, ends, training, schedule, **how)
        assert found == pytest.approx(alone, rel=1e-6), (ends, schedule)
    pieces = losses(model, [1, 2, 3, 4], training, "interleaved", chunks=2, **how)
    assert pieces == pytest.approx(alone, rel=1e-6)


def test_the_curve_is_that_of_transformers(tmp_path: Path) -> None:
    """One process with the whole model of transformers and AdamW of torch gives the same losses."""
    training = make_training(weight_decay=0.0, warmup_steps=0, clip_norm=0)
    whole = save_model(tmp_path, "llama").train()
    adam = torch.optim.AdamW(whole.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    pipeline = Pipeline(tmp_path, [3, 4], training)
    for stage in pipeline.stages:
        for name, parameter in stage.model.global_named_parameters():
            parameter.data.copy_(whole.state_dict()[name])
    expected = []
    for step in range(3):
        input_ids, labels = random_batch(training, step)
        logits = whole(input_ids).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        adam.param_groups[0]["lr"] = 1e-2 * (1 + torch.cos(torch.tensor(torch.pi * step / STEPS)).item()) / 2
        adam.step()
        adam.zero_grad()
        expected.append(loss.item())
    assert pipeline.train(3) == pytest.approx(expected, rel=1e-5)
    pipeline.close()


@on_devices
def test_a_run_repeats_itself(device: str, tmp_path: Path) -> None:
    """The same seed gives the same bits; another seed does not."""
    model, training = write_config(tmp_path, "mixtral"), make_training(steps=4)
    first = losses(model, [1, 4], training, device=device)
    assert losses(model, [1, 4], training, device=device) == first
    assert losses(model, [1, 4], make_training(steps=4, seed=1), device=device) != first


@pytest.mark.slow
@on_devices
def test_bf16_follows_fp32(device: str, tmp_path: Path) -> None:
    """Training with bf16 copies of fp32 weights stays near the fp32 curve, and does not depend on the cut."""
    model = write_config(tmp_path, "mixtral")
    lowered, how = make_training(precision="bf16"), {"device": device, "steps": 10}
    exact, alone = (losses(model, [4], training, **how) for training in (make_training(), lowered))
    assert alone == pytest.approx(exact, rel=0.03)
    assert losses(model, [1, 4], lowered, **how) == pytest.approx(alone, rel=1e-3)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("variant", ["llama-tied", "qwen3-tied-window", "mixtral"])
def test_a_card_follows_a_cpu(variant: str, tmp_path: Path) -> None:
    """The same model from the same weights, cut on the card and whole on a CPU: the same curve in fp32."""
    model, training = write_config(tmp_path, variant), make_training()
    found = losses(model, [1, 2, 4], training, "overlapped", device="cuda")
    assert found == pytest.approx(losses(model, [4], training), rel=1e-3)


@on_devices
@pytest.mark.parametrize("variant", ["qwen3-tied-window", "mixtral"])
@pytest.mark.parametrize(("kind", "layers"), [("selective", None), ("moe", None), ("full", 1), ("full", None)])
def test_recomputation_changes_nothing(
    variant: str, kind: RecomputeKind, layers: int | None, device: str, tmp_path: Path
) -> None:
    """What is not kept and computed again in the backward gives the same bits, of one layer or of all."""
    model, training = write_config(tmp_path, variant), make_training(steps=2)
    again = RecomputePolicy(kind, layers)
    kept = losses(model, [1, 4], training, device=device)
    assert losses(model, [1, 4], training, recompute=again, device=device) == kept


def test_an_answer_missing_from_a_micro_batch_is_no_nan(tmp_path: Path) -> None:
    """Micro-batches, and a whole step, without a counted label cost nothing and leave the rest exact."""
    training = make_training(steps=3, clip_norm=0.0)

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        input_ids, labels = random_batch(training, step)
        labels[2 : (4 if step < 2 else None)] = -100
        if step == 2:
            labels[:] = -100
        return input_ids, labels

    curves = []
    for ends in ([4], [1, 4]):
        pipeline = Pipeline(write_config(tmp_path, "mixtral"), ends, training)
        curves.append(pipeline.train(3, batch=batch))
        assert all(torch.isfinite(weight).all() for weight in pipeline.weights().values())
        assert [stage.norms[2] for stage in pipeline.stages] == [0.0] * len(ends)
        pipeline.close()
    assert curves[0][2] == 0.0
    assert curves[1] == pytest.approx(curves[0], rel=1e-6)


def test_a_loss_that_is_not_finite_moves_no_stage(tmp_path: Path) -> None:
    """A weight that overflows makes every stage skip its update; once mended, training goes on as before."""
    model, training = write_config(tmp_path, "llama"), make_training(steps=4)
    pipeline, straight = (Pipeline(model, [2, 4], training) for _ in range(2))
    norm = pipeline.stages[1].model.first_chunk.model.norm.weight
    kept = norm.detach().clone()
    norm.data.fill_(float("inf"))
    pipeline.train(1)
    assert not any(torch.isfinite(torch.tensor(stage.norms[0])) for stage in pipeline.stages)
    norm.data.copy_(kept)
    before = straight.weights()
    assert all(torch.equal(before[name], weight) for name, weight in pipeline.weights().items())
    pipeline.train(1, first=1)
    straight.train(1, first=1)
    assert pipeline.stages[1].losses[-1] == straight.stages[1].losses[-1]
    pipeline.close()
    straight.close()


@on_devices
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_has_the_same_bits(precision: str, device: str, tmp_path: Path) -> None:
    """Weights, moments and counts taken over by fresh stages go on as the run would have."""
    model = write_config(tmp_path, "llama-tied")
    training = make_training(steps=8, precision=precision, clip_norm=0.1)
    straight, first, second = (Pipeline(model, [1, 4], training, device=device) for _ in range(3))
    straight.train(8)
    first.train(5)
    first.evaluate(*random_batch(training, 77))
    for old, new in zip(first.stages, second.stages, strict=True):
        new.optimizer.load_checkpoint_state(
            {name: one.clone() for name, one in old.optimizer.checkpoint_state().items()}
        )
    second.train(3, first=5)
    assert first.stages[1].losses + second.stages[1].losses == straight.stages[1].losses
    expected = straight.weights()
    assert all(torch.equal(expected[name], weight) for name, weight in second.weights().items())
    for one in (straight, first, second):
        one.close()


def test_micro_batch_size_changes_nothing_but_rounding(tmp_path: Path) -> None:
    """The loss is per counted token of the whole batch, so the cut into micro-batches does not matter."""
    model = write_config(tmp_path, "llama")
    curves = [losses(model, [2, 4], make_training(micro_batch_size=size, steps=6)) for size in (1, 2, 8)]
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=1e-4)


@on_devices
def test_copies_of_a_tied_embedding_stay_identical(device: str, tmp_path: Path) -> None:
    """First and last stage end each step with the same bits in their copies."""
    pipeline = Pipeline(write_config(tmp_path, "llama-tied"), [1, 3, 4], make_training(), device=device)
    pipeline.train(5)
    first, last = (dict(pipeline.stages[place].model.global_named_parameters()) for place in (0, -1))
    assert torch.equal(first[EMBEDDING_WEIGHT], last[EMBEDDING_WEIGHT])
    pipeline.close()


def test_all_stages_clip_by_one_norm(tmp_path: Path) -> None:
    """The gradient norm is that of the whole model, a tied embedding counted once, on every stage."""
    model, training = write_config(tmp_path, "llama-tied"), make_training()
    alone, cut = Pipeline(model, [4], training), Pipeline(model, [1, 4], training)
    alone.train(3)
    cut.train(3)
    assert cut.stages[0].norms == cut.stages[1].norms
    assert cut.stages[0].norms == pytest.approx(alone.stages[0].norms, rel=1e-6)
    alone.close()
    cut.close()


@on_devices
def test_evaluation_trains_nothing_and_takes_any_number_of_samples(device: str, tmp_path: Path) -> None:
    """A held-out loss leaves the weights alone and equals that of one process, the last cut being smaller."""
    model, training = write_config(tmp_path, "llama"), make_training()
    input_ids, labels = random_batch(make_training(global_batch_size=10), 99)
    input_ids, labels = input_ids[:5], labels[:5]
    alone, cut = (Pipeline(model, ends, training, device=device) for ends in ([4], [1, 2, 4]))
    before = cut.weights()
    assert cut.evaluate(input_ids, labels) == pytest.approx(alone.evaluate(input_ids, labels), rel=1e-6)
    assert all(torch.equal(before[name], weight) for name, weight in cut.weights().items())
    assert cut.train(2) == pytest.approx(alone.train(2), rel=1e-6)
    alone.close()
    cut.close()


class Slow(Future[None]):
    """The arrival of a message that its receiver must wait for."""

    def result(self, timeout: float | None = None) -> None:
        if not self.done():
            self.set_result(None)


class Far(Communicator):
    """An exchange with a stage far away, which counts the messages that are on their way to it."""

    def __init__(self) -> None:
        super().__init__("ab", 0)
        self.sent, self.most = list[Slow](), 0

    def start_message(self, message: TensorMessage) -> SendWork:
        self.sent.append(Slow())
        self.most = max(self.most, sum(not one.done() for one in self.sent))
        return SendWork(self.sent[-1], "send", message.tensor)


def test_an_evaluation_is_ahead_of_the_network_by_a_few_messages(tmp_path: Path) -> None:
    """However many are evaluated: what was sent and has not arrived is in the memory of who sent it."""
    model = write_config(tmp_path, "llama")
    stage = build_stage(model, (0, 1), dtype=torch.float32, device="cpu", seed=0, weights="random")
    exchange = Far()
    executor = StageExecutor(ModelChunks([stage]), 0, range(2), exchange, dtype=torch.float32)
    batches = MicroBatches.split(40, 1, 4, torch.zeros((40, 4), dtype=torch.int64))
    executor.run(forward_only(2, 40), batches, StepTimer())
    assert len(exchange.sent) == 40
    assert exchange.most <= 17


def test_what_crosses_clusters_is_counted(tmp_path: Path) -> None:
    """WAN bytes are the activations and gradients sent to another cluster, and nothing inside one."""
    training = make_training(steps=1)
    pipeline = Pipeline(write_config(tmp_path, "llama"), [1, 2, 4], training, clusters="aab")
    pipeline.train(1)
    crossing = training.global_batch_size * training.sequence_length * 16 * 4
    assert [stage.accounts[0].wan_bytes for stage in pipeline.stages] == [0, crossing, crossing]
    pipeline.close()


def test_spans_tell_the_story_of_a_step(tmp_path: Path) -> None:
    """A traced step has a span per forward and backward of each micro-batch, and one update at the end."""
    training = make_training(steps=1)
    pipeline = Pipeline(write_config(tmp_path, "llama"), [2, 4], training)
    pipeline.train(1)
    for stage in pipeline.stages:
        spans = stage.accounts[0].spans
        for kind in ("forward", "backward", "send", "receive"):
            assert sorted(one.micro_batch for one in spans if one.kind == kind) == [0, 1, 2, 3]
        assert [one.kind for one in spans][-1] == "update"
        assert all(one.start_s <= one.end_s for one in spans)
    pipeline.close()


class Watch:
    """A clock that only moves when someone sleeps."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds


def test_a_virtual_chip_takes_its_time(tmp_path: Path) -> None:
    """Each forward and backward is padded to the virtual chip's time; only that counts as computing."""
    watch, training = Watch(), make_training(steps=1)
    times = StageTime(forward_s=0.25, backward_s=0.5)
    pipeline = Pipeline(write_config(tmp_path, "llama"), [4], training, stage_time=times, sleep=watch.sleep)
    account = StepTimer(clock=watch)
    batches = MicroBatches.split(8, 2, 8, *random_batch(training, 0))
    pipeline.stages[0].executor.run(gpipe(1, 4), batches, account)
    assert account.compute_s == 4 * 0.75
    assert account.overrun_s == 0
    pipeline.close()


def test_a_wait_is_exposed_while_the_message_is_under_way() -> None:
    """A wait splits into the part in which the message was under way and the rest."""
    account = StepTimer()
    account.add_wait(10.0, 14.0, (8.0, 13.0))
    assert (account.exposed_communication_s, account.idle_s) == (3.0, 1.0)
    account.add_wait(20.0, 21.0, (20.5, 20.75))
    assert (account.exposed_communication_s, account.idle_s) == (3.25, 1.75)
    account.add_wait(30.0, 31.0, None)
    assert (account.exposed_communication_s, account.idle_s) == (3.25, 2.75)
    account.add_wait(40.0, 41.0, (10.0, 11.0))
    assert (account.exposed_communication_s, account.idle_s) == (3.25, 3.75)


@pytest.mark.parametrize(("size", "sizes"), [(8, (3, 3, 2)), (6, (3, 3)), (2, (2,))])
def test_samples_are_cut_without_loss(size: int, sizes: tuple[int, ...]) -> None:
    """Micro-batches hold every sample once; the last may be smaller; the scale is one over counted labels."""
    ids = torch.arange(size * 4).reshape(size, 4)
    labels = ids.clone()
    labels[0, 0] = -100
    batches = MicroBatches.split(size, 3, 4, ids, labels)
    assert batches.sizes == sizes
    assert torch.equal(torch.cat(batches.inputs), ids)
    assert batches.token_weight == 1 / (size * 4 - 1)
