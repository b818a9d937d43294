"""`open_links`: connections from the rank that holds the ledger to the ranks that decode."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from isthmus.core.errors import UnavailableError
from isthmus.rl.process.relay_ranks import relay_ranks
from isthmus.rl.rollout.engine_link import EngineLink
from isthmus.rl.rollout.open_engine import engine_dtype, model_digest, sampling_of
from isthmus.rl.rollout.rollout_coordinator import RolloutCoordinator
from isthmus.rl.rollout.wire_messages import EngineGreeting
from isthmus.rl.versions.version_store import VersionStore
from isthmus.train.process.trainer import Trainer
from isthmus.wan import dial

DIAL_TIMEOUT_S = 2.0
"""Longest time to connect, of which a link that is cut takes all: short, so that a restored one is soon used."""


def open_links(
    trainer: Trainer,
    coordinator: RolloutCoordinator,
    versions: VersionStore,
    stop_tokens: frozenset[int],
    weights: Mapping[str, torch.Tensor],
) -> list[EngineLink]:
    """Return a link to each rank of the plan that decodes, dialling; `weights` have the parameters of the model."""
    spec = trainer.spec
    greeting = EngineGreeting(
        run=spec.run, sampling=sampling_of(spec.job, stop_tokens), dtype=str(engine_dtype(spec.job)),
        model=model_digest(spec.job), parameters={name: tuple(one.shape) for name, one in weights.items()},
    )  # fmt: skip
    first = len(spec.plan.ranks)
    links = []
    for number, place in enumerate(spec.plan.rollouts):
        link = EngineLink(
            f"{place.cluster}.{first + number}", place.cluster, partial(_dial, trainer, first + number),
            trainer.keys.links, replace(greeting, relays=relay_ranks(spec.plan.rollouts, number, first)),
            coordinator, versions,
        )  # fmt: skip
        link.start()
        links.append(link)
    return links


def _dial(trainer: Trainer, rank: int) -> socket.socket:
    """Return a connection to a rank at its present place; raises `UnavailableError` for one that is not there."""
    spec, ranks = trainer.spec, trainer.folder.read_rank_map()
    worker = next((one for one in (ranks.workers if ranks is not None else ()) if one.rank == rank), None)
    if worker is None:
        raise UnavailableError(f"rank {rank} has not joined", hint="it joins once its cluster has a free chip")
    route = None if worker.cluster == spec.cluster else spec.routes.get(worker.cluster)
    return dial((worker.host, worker.port), route, DIAL_TIMEOUT_S)
