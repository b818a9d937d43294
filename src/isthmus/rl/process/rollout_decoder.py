"""`RolloutDecoder`: the engine of a rank that decodes, and the weights that it has; they outlive connections."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from isthmus.comm.channel.link_keys import LinkKeys
from isthmus.core.errors import InputError, IsthmusError
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.core.plan_parts.rollout_place import RolloutPlace
from isthmus.core.process.gc_pause import collection_paused
from isthmus.rl.process.rollout_clock import RolloutClock
from isthmus.rl.relay.relay_events import Version
from isthmus.rl.rollout.chunk_sender import ChunkSender
from isthmus.rl.rollout.engine_messages import DropSample, StartSample, SwitchVersion, TokensReport
from isthmus.rl.rollout.engine_runner import EngineRunner
from isthmus.rl.rollout.message_link import MessageLink
from isthmus.rl.rollout.open_engine import engine_dtype, engine_slots, model_digest, open_engine
from isthmus.rl.rollout.weights_exchange import ORIGIN, RelaySource, Staged, WeightsExchange
from isthmus.rl.rollout.wire_messages import (
    EndRun,
    EngineGreeting,
    Message,
    Ready,
    VersionOffer,
    VersionStaged,
    WeightsChunk,
    WeightsLacking,
    pack_message,
    unpack_message,
)
from isthmus.rl.versions.weights_receiver import WeightsReceiver
from isthmus.train.communication.step_metrics import MetricsLog
from isthmus.train.process.prepare_stage import worker_device

READER_TIMEOUT_S = 20.0
_IDLE_S = 0.05


class RolloutDecoder:
    """Serves the holder of the ledger, one connection after another.

    `sources_of` returns the ranks of that number as sources of weights.
    """

    def __init__(
        self, spec: WorkerSpec, log: MetricsLog, keys: LinkKeys | None,
        sources_of: Callable[[Sequence[int]], tuple[RelaySource, ...]],
    ) -> None:  # fmt: skip
        self._spec, self._log, self._keys, self._sources_of = spec, log, keys, sources_of
        self.clock = RolloutClock(time.monotonic)
        self.opened = threading.Event()
        self._exchange: WeightsExchange | None = None
        self._staged: queue.Queue[Staged | None] = queue.Queue()
        self._stager: threading.Thread | None = None
        self._runner: EngineRunner | None = None
        self._sender: ChunkSender | None = None
        self._greeting: EngineGreeting | None = None

    @property
    def _place(self) -> RolloutPlace:
        plan = self._spec.plan
        return plan.rollouts[self._spec.rank - len(plan.ranks)]

    def serve(self, link: MessageLink, greeting: EngineGreeting) -> bool:
        """Follow the orders of one connection; return True at the end of the run. Raises `OSError` when it is cut."""
        if greeting.run != self._spec.run:
            raise InputError("a caller of another run", hint="check the job's rank map")
        slots = engine_slots(self._spec.job, len(self._spec.plan.rollouts), self._place)
        if problem := self._problem_of(greeting):
            link.send(pack_message(Ready(num_slots=1, version=None, problem=problem)))
            is_end = isinstance(unpack_message(link.receive()[0]), EndRun)
            link.send(pack_message(EndRun()))
            return is_end
        exchange = self._open_exchange(greeting)
        link.send(pack_message(Ready(num_slots=slots, version=exchange.version)))
        if self._runner is not None:
            self._runner.reset()
        sender = self._sender = ChunkSender(link, ORIGIN)
        inbox: queue.Queue[Message | None] = queue.Queue()
        reader = threading.Thread(target=self._read, args=(link, exchange, inbox), name="isthmus-orders", daemon=True)
        sender.start()
        exchange.join_origin(sender)
        reader.start()
        try:
            return self._decode(sender, inbox)
        finally:
            self._sender = None
            exchange.lose_origin()
            sender.close(READER_TIMEOUT_S)
            link.close()
            reader.join(READER_TIMEOUT_S)

    def serve_weights(self, link: MessageLink, name: str) -> None:
        """Send weights to another rank that decodes; the first greeting has been `opened`."""
        if self._exchange is not None:
            self._exchange.serve(link, name)

    def close(self) -> None:
        """End what goes on beside the connection."""
        if self._exchange is not None:
            self._exchange.close()
        if self._stager is not None:
            self._staged.put(None)
            self._stager.join(READER_TIMEOUT_S)

    def _open_exchange(self, greeting: EngineGreeting) -> WeightsExchange:
        """Return what takes weights in; the first greeting says of which model, and who else has them."""
        self._greeting = greeting
        if self._exchange is None:
            shapes = {name: torch.Size(one) for name, one in greeting.parameters.items()}
            receiver = WeightsReceiver(shapes, engine_dtype(self._spec.job))
            name = f"{self._spec.cluster}.{self._spec.rank}"
            self._exchange = WeightsExchange(greeting.run, name, receiver, self._staged, self._keys)
            self._exchange.start(self._sources_of(greeting.relays))
            self._stager = threading.Thread(target=self._stage_all, name="isthmus-stages", daemon=True)
            self._stager.start()
            self.opened.set()
        return self._exchange

    def _problem_of(self, greeting: EngineGreeting) -> str:
        """Return why this site cannot decode for the run, or ""."""
        job = self._spec.job
        if str(engine_dtype(job)) != greeting.dtype:
            return f"it decodes in {engine_dtype(job)}, the weights are of {greeting.dtype}: use one job at all sites"
        if model_digest(job) != greeting.model:
            return f"{job.model} is another model here than at the training site: bring the same configuration"
        return ""

    def _decode(self, sender: ChunkSender, inbox: queue.Queue[Message | None]) -> bool:
        """Decode and report until the run ends (True) or the connection does (False)."""
        while True:
            idle = self._runner is None or self._runner.is_idle
            if idle:
                self.clock.enter("wait_weights" if self._runner is None else "wait_samples")
            while True:
                try:
                    order = inbox.get(timeout=_IDLE_S) if idle else inbox.get_nowait()
                except queue.Empty:
                    break
                if isinstance(order, EndRun):
                    self._write_metrics()
                    sender.send(order)
                    return True
                if order is None:
                    return False
                self._follow(order)
                idle = False
            if self._runner is not None:
                self._step(sender, self._runner)

    def _follow(self, order: Message) -> None:
        """Pass an order on to the engine, which the weights before it may just have made."""
        if self._runner is not None and isinstance(order, StartSample | DropSample | SwitchVersion):
            if isinstance(order, SwitchVersion):
                self._write_metrics()
            self._runner.handle(order)

    def _step(self, sender: ChunkSender, runner: EngineRunner) -> None:
        """Decode a token of each sample and report."""
        if not runner.is_idle:
            self.clock.enter("decode")
        with collection_paused():
            reports = runner.step()
        for report in reports:
            if isinstance(report, TokensReport):
                self.clock.add_tokens(len(report.tokens))
            sender.send(report)

    def _write_metrics(self) -> None:
        """Write what was done under the present version, as metrics of the step that ends with it."""
        if self._runner is not None:
            last = self._spec.job.training.steps - 1
            self._log.write(min(self._runner.version, last), dict(self.clock.take()))

    def _read(self, link: MessageLink, exchange: WeightsExchange, inbox: queue.Queue[Message | None]) -> None:
        """Take in weights here, beside decoding, and pass orders on."""
        with suppress(OSError, IsthmusError):
            while True:
                header, content = link.receive()
                message = unpack_message(header)
                if isinstance(message, VersionOffer | WeightsChunk | WeightsLacking):
                    exchange.take(ORIGIN, message, content)
                else:
                    inbox.put(message)
        inbox.put(None)

    def _stage_all(self) -> None:
        """Give each version that is complete to the engine, and say so; a thread of its own, beside both."""
        while (staged := self._staged.get()) is not None:
            problem = staged.problem
            if not problem:
                try:
                    self._stage(staged)
                except IsthmusError as error:
                    problem = error.message
            if (sender := self._sender) is not None and self._exchange is not None:
                relayed = self._exchange.take_relayed()
                sender.send(VersionStaged(version=staged.version, problem=problem, relayed=relayed))

    def _stage(self, staged: Staged) -> None:
        """Copy weights to the engine, or open one: the first, or one with older weights of a trainer that went back."""
        version: Version = staged.version
        runner, greeting = self._runner, self._greeting
        if runner is not None and version.step > runner.version:
            runner.stage(version.step, staged.tensors)
        elif greeting is not None and (runner is None or version.step < runner.version):
            engine = open_engine(
                self._spec.job, version.step, staged.tensors, worker_device(self._spec), len(self._spec.plan.rollouts),
                place=self._place, samples=True,
            )  # fmt: skip
            self._runner = EngineRunner(engine, greeting.sampling)
