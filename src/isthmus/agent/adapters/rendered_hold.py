"""`RenderedHold`: what a scheduler would get for a part, as `isthmus render` writes it. Nothing is sent."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from isthmus.agent.adapters.local_adapter import COMMAND_WORKER, WORKER_COMMAND
from isthmus.agent.adapters.scheduler_adapter import HoldRequest, RankNeed
from isthmus.core.job import Job
from isthmus.core.messages.worker_folder import WorkerLimits
from isthmus.core.plan import Plan, PlanPart
from isthmus.render import Setting

HOLD_ID = "0" * 32
"""Stands for the id of a hold, which the agent draws with its key."""

STATE_FOLDER, WORKER_FOLDER = "{state}", "{worker_folder}"
"""Stand for the agent's state folder and a worker's folder in it."""

CARDS = "{cards}"
"""Stands for the ids of a rank's cards, which the scheduler chooses."""

USUAL_LIMITS = WorkerLimits()
"""Limits of a worker under a policy without `workers`."""


@dataclass(frozen=True, kw_only=True)
class PartRequest:
    """A part for rendering: the request of its hold, the ranks in its order, and the program of a rank."""

    request: HoldRequest
    ranks: tuple[int, ...]
    program: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RenderedHold:
    """The job file of a part, and by node group the settings beside those that the worker's own files have."""

    file_name: str
    text: str
    settings: Mapping[str, tuple[Setting, ...]]


def part_request(job: Job, job_id: str, attempt: int, plan: Plan, cluster: str) -> PartRequest:
    """Return the part of a plan at `cluster` as its agent asks for it, in the order of the ranks."""
    ranks = PlanPart.from_plan(plan, cluster).ranks
    needs = tuple(RankNeed(node_group=plan.stage_of(rank).node_group, num_cards=plan.chips_of(rank)) for rank in ranks)
    worker = COMMAND_WORKER if job.engine == "command" else WORKER_COMMAND
    return PartRequest(
        request=HoldRequest(id=HOLD_ID, job=job_id, attempt=attempt, ranks=needs, lease_s=0.0),
        ranks=ranks, program=(*worker, WORKER_FOLDER),
    )  # fmt: skip


def shown_words(words: Sequence[str]) -> tuple[str, ...]:
    """Return a command with `{python}` for the Python of the machine that renders: the site has one of its own."""
    return tuple("{python}" if word == sys.executable else word for word in words)


def variable_settings(variables: Mapping[str, str]) -> Iterator[Setting]:
    """Yield the variables that the agent gives every worker."""
    for name, value in variables.items():
        yield Setting(name=name, setting_class="resources", value=value, passed_as="environment", origin="agent")
