"""`open_links`: connections from the rank that holds the ledger to the ranks that decode."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from isthmus.core.errors import ProtocolError
from isthmus.rl.rollout.engine_link import EngineLink
from isthmus.rl.rollout.open_engine import engine_dtype, model_digest, sampling_of
from isthmus.rl.rollout.rollout_coordinator import RolloutCoordinator
from isthmus.rl.rollout.version_store import VersionStore
from isthmus.rl.rollout.wire_messages import EngineGreeting
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
    spec, ranks = trainer.spec, trainer.folder.read_rank_map()
    workers = {one.rank: one for one in (ranks.workers if ranks is not None else ())}
    greeting = EngineGreeting(
        run=spec.run, sampling=sampling_of(spec.job, stop_tokens), dtype=str(engine_dtype(spec.job)),
        model=model_digest(spec.job), parameters={name: tuple(one.shape) for name, one in weights.items()},
    )  # fmt: skip
    links = []
    for rank in range(len(spec.plan.ranks), spec.plan.num_ranks):
        if rank not in workers:
            raise ProtocolError(f"the rank map has no rank {rank}", hint="restart the workers of this job")
        worker = workers[rank]
        route = None if worker.cluster == spec.cluster else spec.routes.get(worker.cluster)
        link = EngineLink(
            f"{worker.cluster}.{rank}", worker.cluster,
            partial(dial, (worker.host, worker.port), route, DIAL_TIMEOUT_S), trainer.keys.links,
            greeting, coordinator, versions,
        )  # fmt: skip
        link.start()
        links.append(link)
    return links
