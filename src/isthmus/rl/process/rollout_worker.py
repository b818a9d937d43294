"""`run_rollout`: a rank that decodes. It listens; the rank that holds the ledger dials it, and dials again when cut."""

from __future__ import annotations

import gc
import queue
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch

from isthmus.core.errors import IsthmusError, PeerError, UnavailableError
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec
from isthmus.rl.process.open_links import DIAL_TIMEOUT_S
from isthmus.rl.process.pin_cores import pin_cores
from isthmus.rl.process.rollout_decoder import RolloutDecoder
from isthmus.rl.rollout.message_link import MessageLink
from isthmus.rl.rollout.weights_exchange import RelaySource
from isthmus.rl.rollout.wire_messages import EngineGreeting, RelayGreeting, unpack_message
from isthmus.train.communication.step_metrics import MetricsLog
from isthmus.train.process.worker import RankResources, wait_for_rank_map, worker_address
from isthmus.wan import dial

HANDSHAKE_TIMEOUT_S = 20.0
OPENING_S = 3.0
"""How long a site that asks for weights waits for the first greeting of the holder of the ledger."""
MAX_CALLERS = 256
"""Most connections that a rank serves at once."""

Call = tuple[MessageLink, EngineGreeting]


def run_rollout(folder: WorkerFolder, spec: WorkerSpec, resources: RankResources) -> None:
    """Decode until the run ends; raises `PeerError` if the holder of the ledger is gone for `peer_timeout_s`."""
    torch.set_num_threads(spec.threads)
    folder.write_checkin(worker_address(spec, resources.listener))
    wait_for_rank_map(folder, spec)
    print(f"rank {spec.rank}: decodes in cluster {spec.cluster}", flush=True)
    cores = pin_cores(spec.local_rank, spec.local_world_size, spec.threads)
    if cores:
        print(f"rank {spec.rank}: runs on cores {', '.join(map(str, sorted(cores)))}", flush=True)
    gc.collect()
    gc.freeze()
    with MetricsLog(folder.metrics_path, spec, None, 0) as log:
        decoder = RolloutDecoder(spec, log, resources.keys.links, partial(_sources, folder, spec))
        calls: queue.Queue[Call] = queue.Queue()
        ended = threading.Event()
        acceptor = threading.Thread(
            target=_accept_calls, args=(resources, spec, decoder, calls, ended), name="isthmus-calls", daemon=True
        )  # fmt: skip
        acceptor.start()
        try:
            _answer_calls(spec, decoder, calls)
        finally:
            ended.set()
            decoder.close()
            acceptor.join(HANDSHAKE_TIMEOUT_S)


def _sources(folder: WorkerFolder, spec: WorkerSpec, numbers: Sequence[int]) -> tuple[RelaySource, ...]:
    """Return the ranks of these numbers as sources of weights."""
    clusters = {number: spec.plan.stage_of(number).cluster for number in numbers if spec.plan.is_rollout(number)}
    return tuple(
        RelaySource(name=f"{cluster}.{number}", cluster=cluster, dial=partial(_dial, folder, spec, number))
        for number, cluster in clusters.items()
        if number != spec.rank
    )


def _dial(folder: WorkerFolder, spec: WorkerSpec, rank: int) -> socket.socket:
    """Return a connection to another rank that decodes; raises `UnavailableError` without a way there."""
    ranks = folder.read_rank_map()
    worker = next((one for one in (ranks.workers if ranks is not None else ()) if one.rank == rank), None)
    route = None if worker is None or worker.cluster == spec.cluster else spec.routes.get(worker.cluster)
    if worker is None or (route is None and spec.routes and worker.cluster != spec.cluster):
        raise UnavailableError(f"there is no way to rank {rank}", hint="add a link between the two clusters")
    return dial((worker.host, worker.port), route, DIAL_TIMEOUT_S)


def _answer_calls(spec: WorkerSpec, decoder: RolloutDecoder, calls: queue.Queue[Call]) -> None:
    """Serve one connection of the holder of the ledger after another until the run ends."""
    silent_since_s = time.monotonic()
    while time.monotonic() - silent_since_s < spec.peer_timeout_s:
        try:
            link, greeting = calls.get(timeout=1.0)
        except queue.Empty:
            continue
        try:
            if decoder.serve(link, greeting):
                return
        except (OSError, IsthmusError) as error:
            print(f"the connection to the ledger is cut: {' '.join(str(error).split())}", flush=True)
        finally:
            decoder.clock.enter("wait_link")
            link.close()
        silent_since_s = time.monotonic()
    raise PeerError(
        f"the rank that holds the ledger did not connect for {spec.peer_timeout_s:g} s",
        hint="check the job at its training clusters",
    )


def _accept_calls(
    resources: RankResources, spec: WorkerSpec, decoder: RolloutDecoder, calls: queue.Queue[Call],
    ended: threading.Event,
) -> None:  # fmt: skip
    """Take connections until the run has `ended`, each in a thread of its own."""
    resources.listener.settimeout(1.0)
    callers = threading.BoundedSemaphore(MAX_CALLERS)
    while not ended.is_set():
        with suppress(TimeoutError):
            sock, _ = resources.listener.accept()
            if not callers.acquire(blocking=False):
                sock.close()
                continue
            answer = partial(_answer, sock, resources, spec, decoder, calls, callers)
            threading.Thread(target=answer, name="isthmus-caller", daemon=True).start()


def _answer(
    sock: socket.socket, resources: RankResources, spec: WorkerSpec, decoder: RolloutDecoder,
    calls: queue.Queue[Call], callers: threading.BoundedSemaphore,
) -> None:  # fmt: skip
    """Hand a connection of the ledger on, or send weights to a site that asks for them."""
    try:
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = MessageLink.accepted(sock, resources.keys.links)
        greeting = unpack_message(link.receive()[0])
        if isinstance(greeting, EngineGreeting):
            calls.put((link, greeting))
            return
        if isinstance(greeting, RelayGreeting) and greeting.run == spec.run and decoder.opened.wait(OPENING_S):
            decoder.serve_weights(link, greeting.name)
        link.close()
    except (OSError, IsthmusError) as error:
        sock.close()
        print(f"a connection ends: {' '.join(str(error).split())}", flush=True)
    finally:
        callers.release()
