"""`run_rollout`: a rank that decodes. It listens; the rank that holds the ledger dials it, and dials again when cut."""

from __future__ import annotations

import gc
import queue
import socket
import threading
import time
from contextlib import suppress

import torch

from isthmus.comm.channel.link_keys import LinkKeys
from isthmus.core.errors import InputError, IsthmusError, PeerError
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec
from isthmus.core.plan_parts.rollout_place import RolloutPlace
from isthmus.rl.process.rollout_clock import RolloutClock
from isthmus.rl.rollout.engine_messages import DropSample, StartSample, SwitchVersion, TokensReport
from isthmus.rl.rollout.engine_runner import EngineRunner
from isthmus.rl.rollout.message_link import BEAT_S, MessageLink
from isthmus.rl.rollout.open_engine import engine_dtype, engine_slots, model_digest, open_engine
from isthmus.rl.rollout.weights_stream import WeightsReceiver, digest_of
from isthmus.rl.rollout.wire_messages import (
    Beat,
    EndRun,
    EngineGreeting,
    Message,
    Ready,
    VersionBegin,
    VersionChunk,
    VersionEnd,
    VersionStaged,
    pack_message,
    unpack_message,
)
from isthmus.train.communication.step_metrics import MetricsLog
from isthmus.train.process.prepare_stage import worker_device
from isthmus.train.process.worker import RankResources, wait_for_rank_map, worker_address

HANDSHAKE_TIMEOUT_S = 20.0
_IDLE_S = 0.05


def run_rollout(folder: WorkerFolder, spec: WorkerSpec, resources: RankResources) -> None:
    """Decode until the run ends; raises `PeerError` if the holder of the ledger is gone for `peer_timeout_s`."""
    torch.set_num_threads(spec.threads)
    folder.write_checkin(worker_address(spec, resources.listener))
    wait_for_rank_map(folder, spec)
    print(f"rank {spec.rank}: decodes in cluster {spec.cluster}", flush=True)
    gc.collect()
    gc.freeze()
    resources.listener.settimeout(1.0)
    with MetricsLog(folder.metrics_path, spec, None, 0) as log:
        _answer_calls(spec, resources, _Decoder(spec, log))


def _answer_calls(spec: WorkerSpec, resources: RankResources, decoder: _Decoder) -> None:
    """Serve one connection after another until the run ends."""
    silent_since_s = time.monotonic()
    while time.monotonic() - silent_since_s < spec.peer_timeout_s:
        try:
            sock, _ = resources.listener.accept()
        except TimeoutError:
            continue
        try:
            if decoder.serve(sock, resources.keys.links):
                return
        except (OSError, IsthmusError) as error:
            print(f"the connection to the ledger is cut: {' '.join(str(error).split())}", flush=True)
        finally:
            decoder.clock.enter("wait_link")
            sock.close()
        silent_since_s = time.monotonic()
    raise PeerError(
        f"the rank that holds the ledger did not connect for {spec.peer_timeout_s:g} s",
        hint="check the job at its training clusters",
    )


def _beat(link: MessageLink, ended: threading.Event) -> None:
    """Say that this side lives, however long a step or a load of weights takes."""
    with suppress(OSError):
        while not ended.wait(BEAT_S):
            link.send(pack_message(Beat()))


class _Decoder:
    """The engine of the rank, which outlives connections, and the weights that it has."""

    def __init__(self, spec: WorkerSpec, log: MetricsLog) -> None:
        self._spec, self._log = spec, log
        self.clock = RolloutClock(time.monotonic)
        self._receiver: WeightsReceiver | None = None
        self._runner: EngineRunner | None = None
        self._problem = ""

    @property
    def _place(self) -> RolloutPlace:
        plan = self._spec.plan
        return plan.rollouts[self._spec.rank - len(plan.ranks)]

    def serve(self, sock: socket.socket, keys: LinkKeys | None) -> bool:
        """Follow the orders of one connection; return True at the end of the run. Raises `OSError` when it is cut."""
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = MessageLink.accepted(sock, keys)
        greeting = unpack_message(link.receive()[0])
        if not isinstance(greeting, EngineGreeting) or greeting.run != self._spec.run:
            raise InputError("a caller of another run", hint="check the job's rank map")
        if problem := self._problem_of(greeting):
            link.send(pack_message(Ready(num_slots=1, step=-1, digest="", problem=problem)))
            is_end = isinstance(unpack_message(link.receive()[0]), EndRun)
            link.send(pack_message(EndRun()))
            return is_end
        dtype = engine_dtype(self._spec.job)
        if self._receiver is None:
            shapes = {name: torch.Size(one) for name, one in greeting.parameters.items()}
            self._receiver = WeightsReceiver(shapes, dtype)
        has = self._receiver.step if self._runner is not None and self._runner.version == self._receiver.step else -1
        digest = digest_of(self._receiver.tensors) if has >= 0 else ""
        link.send(
            pack_message(
                Ready(
                    num_slots=engine_slots(self._spec.job, len(self._spec.plan.rollouts), self._place),
                    step=has,
                    digest=digest,
                )
            )
        )
        if self._runner is not None:
            self._runner.reset()
        inbox: queue.Queue[Message | None] = queue.Queue()
        reader = threading.Thread(target=self._read, args=(link, greeting, inbox), name="isthmus-orders", daemon=True)
        reader.start()
        ended = threading.Event()
        beats = threading.Thread(target=_beat, args=(link, ended), name="isthmus-beats", daemon=True)
        beats.start()
        try:
            return self._decode(link, inbox)
        finally:
            ended.set()
            link.close()
            beats.join(HANDSHAKE_TIMEOUT_S)
            reader.join(HANDSHAKE_TIMEOUT_S)

    def _problem_of(self, greeting: EngineGreeting) -> str:
        """Return why this site cannot decode for the run, or ""."""
        job = self._spec.job
        if str(engine_dtype(job)) != greeting.dtype:
            return f"it decodes in {engine_dtype(job)}, the weights are of {greeting.dtype}: use one job at all sites"
        if model_digest(job) != greeting.model:
            return f"{job.model} is another model here than at the training site: bring the same configuration"
        return ""

    def _decode(self, link: MessageLink, inbox: queue.Queue[Message | None]) -> bool:
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
                    link.send(pack_message(order))
                    return True
                if order is None:
                    return False
                self._follow(order)
                idle = False
            if self._runner is not None:
                self._step(link, self._runner)

    def _follow(self, order: Message) -> None:
        """Pass an order on to the engine, which the weights before it may just have made."""
        if self._runner is not None and isinstance(order, StartSample | DropSample | SwitchVersion):
            if isinstance(order, SwitchVersion):
                self._write_metrics()
            self._runner.handle(order)

    def _step(self, link: MessageLink, runner: EngineRunner) -> None:
        """Decode a token of each sample and report."""
        if not runner.is_idle:
            self.clock.enter("decode")
        for report in runner.step():
            if isinstance(report, TokensReport):
                self.clock.add_tokens(len(report.tokens))
            link.send(pack_message(report))

    def _write_metrics(self) -> None:
        """Write what was done under the present version, as metrics of the step that ends with it."""
        if self._runner is not None:
            last = self._spec.job.training.steps - 1
            self._log.write(min(self._runner.version, last), dict(self.clock.take()))

    def _read(self, link: MessageLink, greeting: EngineGreeting, inbox: queue.Queue[Message | None]) -> None:
        """Take in weights here, beside decoding, and pass orders on."""
        try:
            while True:
                header, content = link.receive()
                message = unpack_message(header)
                if isinstance(message, VersionBegin | VersionChunk | VersionEnd):
                    self._take_weights(link, greeting, message, content)
                else:
                    inbox.put(message)
        except (OSError, IsthmusError):
            return
        finally:
            inbox.put(None)

    def _take_weights(
        self,
        link: MessageLink,
        greeting: EngineGreeting,
        message: VersionBegin | VersionChunk | VersionEnd,
        content: bytes,
    ) -> None:
        """Apply a chunk; with the last one stage the version. What is wrong is said once the version has ended."""
        receiver = self._receiver
        if receiver is None:
            raise RuntimeError("a greeting comes first")
        try:
            match message:
                case VersionBegin():
                    self._problem = ""
                    receiver.begin(message.base)
                case VersionChunk() if not self._problem:
                    receiver.add(vars(message), content)
                case VersionEnd() if not self._problem:
                    self._stage(greeting, message.step, receiver.finish(message.step, message.digest))
        except InputError as error:
            self._problem = error.message
        if isinstance(message, VersionEnd):
            link.send(pack_message(VersionStaged(step=message.step, problem=self._problem)))

    def _stage(self, greeting: EngineGreeting, step: int, weights: dict[str, torch.Tensor]) -> None:
        if self._runner is not None and step > self._runner.version:
            self._runner.stage(step, weights)
            return
        if self._runner is None or step < self._runner.version:
            engine = open_engine(
                self._spec.job, step, weights, worker_device(self._spec), len(self._spec.plan.rollouts),
                place=self._place,
            )  # fmt: skip
            self._runner = EngineRunner(engine, greeting.sampling)
