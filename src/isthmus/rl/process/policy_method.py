"""`PolicyMethod`: a `TrainingMethod` that trains on the model's own responses."""

from __future__ import annotations

import secrets
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import torch

from isthmus.core.errors import InputError, PlanError
from isthmus.core.job import Job
from isthmus.core.job_parts.rl_job import RlConfig
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.core.model_parts.routing_shape import RoutingShape
from isthmus.core.process.gc_pause import collection_paused
from isthmus.data import PromptSet, open_prompts
from isthmus.rl.audit.choose_sample import is_chosen
from isthmus.rl.audit.judge_sample import BF16_BOUNDS, FP32_BOUNDS
from isthmus.rl.audit.trajectory_auditor import SampleClaim, TrajectoryAuditor, audit_or_say
from isthmus.rl.environments.make_turn_taker import make_turn_taker
from isthmus.rl.ledger.ledger_records import LedgerConfig
from isthmus.rl.overlong_penalty import overlong_penalty
from isthmus.rl.process.gather_policy import PolicyGatherer
from isthmus.rl.process.log_probabilities import log_probabilities
from isthmus.rl.process.open_links import open_links
from isthmus.rl.process.policy_batches import STATISTICS, PolicyMicroBatches, make_policy_batches
from isthmus.rl.process.reference_model import ReferenceModel
from isthmus.rl.rewards.reward_pool import RewardPool
from isthmus.rl.rollout.engine_link import EngineLink
from isthmus.rl.rollout.engine_messages import EngineOrder, SwitchVersion
from isthmus.rl.rollout.engine_runner import EngineRunner
from isthmus.rl.rollout.held_out_reward import held_out_reward
from isthmus.rl.rollout.make_batch import make_batch, pack_batch, unpack_batch
from isthmus.rl.rollout.message_link import MAX_CONTENT_BYTES
from isthmus.rl.rollout.open_engine import engine_slots, open_engine, sampling_of
from isthmus.rl.rollout.rollout_coordinator import Audit, RolloutCoordinator
from isthmus.rl.rollout.rollout_limits import RolloutLimits
from isthmus.rl.rollout.rollout_store import RolloutStore
from isthmus.rl.versions.version_store import VersionStore
from isthmus.rl.versions.weights_stream import PolicyVersion
from isthmus.train.liveness.peer_wait import waiting_for_peer
from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.process.trainer import Trainer
from isthmus.train.update.replica_layout import replica_samples

LEDGER_FOLDER = "rollouts"
"""Folder of the ledger, below that of the checkpoints."""

NUM_VERSIONS = 3
"""Versions that are kept for engines that lag."""

END_TIMEOUT_S = 60.0
"""Longest wait at the end of a run for an engine that is cut."""

_WAIT_S = 0.05


class PolicyMethod:
    """Rank 0 holds the ledger, and decodes where no other ranks do; the others get the batches from it."""

    def __init__(self) -> None:
        self._gatherer: PolicyGatherer | None = None
        self._coordinator: RolloutCoordinator | None = None
        self._runner: EngineRunner | None = None
        self._engine_name = ""
        self._orders: deque[EngineOrder | None] = deque()
        self._weights: dict[str, torch.Tensor] = {}
        self._reference: ReferenceModel | None = None
        self._versions = VersionStore(NUM_VERSIONS)
        self._links: list[EngineLink] = []
        self._batches: PolicyMicroBatches | None = None
        self._metrics: dict[str, float] = {}
        self._step = 0

    def open_data(self, spec: WorkerSpec, pieces: ModelChunks, /) -> PromptSet | None:
        """Open the prompts at rank 0 and on the first stage, for whose tokenizer the export asks."""
        rl, cp = _rl(spec), max(stage.cp for stage in spec.plan.stages)
        if cp > 1 and rl.correction is not None and rl.correction.level == "sequence":
            raise PlanError(
                f"correction by sequence needs whole sequences, the plan shares each over {cp} ranks",
                hint="set rl.correction.level to token, or parallel.cp to 1",
            )
        _check_routing(spec.job, pieces.routing)
        if rl.kl > 0:
            self._reference = ReferenceModel(pieces)
        if spec.rank and not pieces.is_first:
            return None
        return open_prompts(spec.job, pieces.vocab_size)

    def begin(self, trainer: Trainer, step: int, /) -> None:
        """Gather the weights after `step` steps, and begin or go on with the ledger."""
        self._step = step
        spec = trainer.spec
        self._gatherer = PolicyGatherer(spec.plan, spec.rank, trainer.prepared.model_chunks, trainer.communicator)
        weights = self._gatherer.gather(trainer.optimizer)
        if weights is None:
            return
        self._weights = weights
        if self._coordinator is None:
            self._coordinator = self._open_coordinator(trainer)
            if _rl(spec).audit:
                self._versions = VersionStore(_rl(spec).max_staleness + NUM_VERSIONS)
        self._versions.add(PolicyVersion(step, weights))
        self._coordinator.begin(step, self._versions.newest_name)
        if spec.plan.rollouts:
            if not self._links:
                self._links = open_links(
                    trainer, self._coordinator, self._versions, _prompts(trainer).stop_tokens, weights
                )
        elif self._runner is None:
            prompts = _prompts(trainer)
            device = trainer.prepared.model_chunks.device
            engine = open_engine(spec.job, step, weights, device, samples=True)
            self._runner = EngineRunner(engine, sampling_of(spec.job, prompts.stop_tokens))
            self._engine_name = f"{spec.cluster}.{spec.rank}.{time.time_ns()}"
            self._coordinator.join_engine(
                self._engine_name, spec.cluster, engine_slots(spec.job), step, self._orders.append
            )

    def next_batches(self, trainer: Trainer, /) -> PolicyMicroBatches:
        """Wait for the samples of the step, and return the replica's part of them."""
        content = self._collect(trainer) if self._coordinator is not None else None
        batch = unpack_batch(trainer.communicator.broadcast_bytes_from_first(content))
        self._metrics.update(batch.metrics)
        spec, pieces = trainer.spec, trainer.prepared.model_chunks
        replica = trainer.position.replica
        batches = make_policy_batches(
            batch, _rl(spec), trainer.training.sequence_length, spec.plan.micro_batch_size_of(replica),
            replica_samples(spec.plan, replica, len(batch.tokens)),
            None if pieces.context is None else pieces.context.share.positions,
            is_first=pieces.is_first, is_last=pieces.is_last,
        )  # fmt: skip
        self._batches = self._with_passes(trainer, batches)
        return self._batches

    def _with_passes(self, trainer: Trainer, batches: PolicyMicroBatches) -> PolicyMicroBatches:
        """Return the micro-batches with log-probabilities that further forward passes give, where the job asks."""
        rl = _rl(trainer.spec)
        if rl.old == "recomputed":
            batches = replace(batches, old_logp=log_probabilities(trainer, batches, rl.temperature))
        if self._reference is not None:
            with self._reference.in_place(trainer.optimizer):
                own = replace(batches, routing=())  # the first weights route by themselves
                batches = replace(batches, reference_logp=log_probabilities(trainer, own, rl.temperature))
        return batches

    def end_step(self, trainer: Trainer, step: int, /) -> dict[str, float | None]:
        """Publish the new weights, and return what is to be seen of the step."""
        if self._gatherer is None:
            raise RuntimeError("begin comes first")
        weights = self._gatherer.gather(trainer.optimizer)
        self._step = step + 1
        if self._coordinator is not None and weights is not None:
            self._weights = weights
            self._versions.add(PolicyVersion(step + 1, weights))
            self._coordinator.end_step(step, is_last=step + 1 == trainer.training.steps)
            for link in self._links:
                link.count_bytes()
        own = self._batches.sums if self._batches is not None and trainer.group.tp_rank == 0 else []
        sums = torch.stack(own).sum(dim=0).cpu() if own else torch.zeros(len(STATISTICS), dtype=torch.float64)
        total = dict(zip(STATISTICS, trainer.communicator.sum_over_all(sums).tolist(), strict=True))
        values: dict[str, float | None] = {}
        if "rollout_s" in self._metrics:
            values["rollout_s"] = self._metrics.pop("rollout_s")
        if not trainer.reports_loss:
            return values
        count = max(total["num_tokens"], 1.0)
        return values | self._metrics | {
            "entropy": total["minus_logp"] / count,
            "clipped_share": total["clipped"] / count,
            "kl_rollout": total["kl_rollout"] / count,
            **({"kl_reference": total["kl_reference"] / count} if self._reference is not None else {}),
            "effective_samples": total["ratio"] ** 2 / max(count * total["ratio_squared"], 1e-30),
        }  # fmt: skip

    def evaluate(self, trainer: Trainer, /) -> dict[str, float | None]:
        """Return the mean reward of the most probable responses to held-out prompts."""
        found: float | None = None
        if self._coordinator is not None:
            with waiting_for_peer():
                found = held_out_reward(
                    trainer.spec.job, _prompts(trainer), self._weights, trainer.prepared.model_chunks.device
                )
        total = trainer.communicator.sum_over_all(torch.tensor([found or 0.0], dtype=torch.float64))
        return {"validation_reward": float(total)}

    def end_save(self, _trainer: Trainer, step: int, /) -> None:
        """Write a snapshot of the ledger beside the checkpoint."""
        if self._coordinator is not None:
            self._coordinator.save(step, self._versions.newest_name)

    def close(self, _trainer: Trainer, /) -> None:
        """End the engines and the rewards."""
        for one in self._links:
            one.close()
        for one in self._links:
            one.join(END_TIMEOUT_S)
        if self._coordinator is not None:
            self._coordinator.close()

    def _open_coordinator(self, trainer: Trainer) -> RolloutCoordinator:
        job, rl = trainer.spec.job, _rl(trainer.spec)
        config = LedgerConfig(
            group=rl.group, batch_prompts=job.training.global_batch_size // rl.group, max_staleness=rl.max_staleness,
            on_update=rl.on_update, filter_groups=rl.filter_groups,
        )  # fmt: skip

        def penalty_of(num_tokens: int) -> float:
            if rl.overlong is None:
                return 0.0
            lengths = torch.tensor([num_tokens])
            given = rl.overlong
            return float(
                overlong_penalty(lengths, rl.max_response_tokens, buffer=given.buffer, penalty=given.penalty)
            )  # fmt: skip

        limits = RolloutLimits(
            max_response_tokens=rl.max_response_tokens, vocab_size=trainer.prepared.model_chunks.vocab_size,
            penalty_of=penalty_of, stop_tokens=_prompts(trainer).stop_tokens,
            owners=frozenset(place.cluster for place in trainer.spec.plan.rollouts), routing=_routing_shape(trainer),
        )  # fmt: skip
        store = RolloutStore(Path(job.checkpoints.folder) / LEDGER_FOLDER)
        reward = RewardPool(rl.rewards, rl.reward_workers)
        return RolloutCoordinator(
            config, limits, _prompts(trainer), reward, store, self._audit(trainer),
            make_turn_taker(rl, _prompts(trainer), limits.vocab_size, rl.reward_workers),
        )  # fmt: skip

    def _audit(self, trainer: Trainer) -> Audit | None:
        """Return what recomputes the share of the samples that the job asks for; what this rank decodes is its own."""
        job, share = trainer.spec.job, _rl(trainer.spec).audit
        if not share or not trainer.spec.plan.rollouts:
            return None
        device = trainer.prepared.model_chunks.device
        auditor = TrajectoryAuditor(
            lambda version, weights, draw: open_engine(job, version, weights, device, draw=draw),
            lambda version: self._versions.tensors(version + (self._coordinator.base if self._coordinator else 0)),
            sampling_of(job, _prompts(trainer).stop_tokens), _rl(trainer.spec).on_update,
            FP32_BOUNDS if job.training.precision == "fp32" else BF16_BOUNDS,
        )  # fmt: skip
        secret = secrets.token_bytes(32)
        return lambda sample, prompt_tokens, trajectory: (
            audit_or_say(auditor, SampleClaim(sample=sample, prompt_tokens=prompt_tokens, trajectory=trajectory))
            if is_chosen(secret, sample.key, share)
            else None
        )

    def _collect(self, trainer: Trainer) -> bytes:
        """Return the batch of the step that begins, decoding here where this rank has an engine."""
        coordinator, start_s = self._coordinator, time.monotonic()
        if coordinator is None:
            raise RuntimeError("only rank 0 has the ledger")
        coordinator.request_batch(self._step)
        with waiting_for_peer():
            while (keys := coordinator.wait_batch(0.0 if self._decode() else _WAIT_S)) is None:
                pass
        batch = make_batch(
            coordinator, _prompts(trainer), _rl(trainer.spec), keys, self._step, _routing_shape(trainer)
        )  # fmt: skip
        self._metrics["rollout_s"] = time.monotonic() - start_s
        return pack_batch(batch)

    def _decode(self) -> bool:
        """Decode one token of each sample here; return whether there is more to decode."""
        runner, coordinator = self._runner, self._coordinator
        if runner is None or coordinator is None:
            return False
        while self._orders:
            if (order := self._orders.popleft()) is None:
                continue
            if isinstance(order, SwitchVersion):
                runner.stage(order.version, self._weights)
            runner.handle(order)
        with collection_paused():
            reports = runner.step()
        for report in reports:
            if problem := coordinator.report(self._engine_name, report):
                print(f"warning: rollouts of {self._engine_name}: {problem}", flush=True)
        return bool(self._orders) or not runner.is_idle


def _rl(spec: WorkerSpec) -> RlConfig:
    if spec.job.rl is None:
        raise RuntimeError(f"job {spec.run} has task {spec.job.task}")
    return spec.job.rl


def _routing_shape(trainer: Trainer) -> RoutingShape | None:
    """Return what engines report of routing, None where it is not replayed."""
    return trainer.prepared.model_chunks.routing if _rl(trainer.spec).replay_routing else None


def _check_routing(job: Job, shape: RoutingShape) -> None:
    """Raise `InputError` where the routing of a model, or of its longest sequence, cannot be replayed."""
    if job.rl is None or not job.rl.replay_routing:
        return
    if not shape.num_layers:
        raise InputError(f"{job.model} has no experts", hint="set rl.replay_routing to false")
    if job.training.compile:
        raise InputError("compiled layers do not replay routing", hint="set training.compile to false")
    most = (job.rl.max_prompt_tokens + job.rl.max_response_tokens) * shape.row_bytes
    if most > MAX_CONTENT_BYTES:
        raise InputError(
            f"the routing of the longest sequence has {most} bytes, a report at most {MAX_CONTENT_BYTES}",
            hint="set rl.replay_routing to false, or shorten rl.max_response_tokens",
        )


def _prompts(trainer: Trainer) -> PromptSet:
    if not isinstance(trainer.prepared.dataset, PromptSet):
        raise RuntimeError("rank 0 has the prompts")
    return trainer.prepared.dataset
