"""`RenderedHold`: what a scheduler would get for a part, as `isthmus render` writes it. Nothing is sent."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from isthmus.agent.adapters.scheduler_adapter import HoldRequest, RankStart
from isthmus.core.messages.worker_folder import WorkerLimits
from isthmus.render import Setting

HOLD_ID = "0" * 32
"""Stands for the id of a hold, which the agent draws with its key."""

STATE_FOLDER, WORKER_FOLDER = "{state}", "{worker_folder}"
"""Stand for the agent's state folder and a worker's folder in it."""

CARDS = "{cards}"
"""Stands for the ids of a rank's cards, which the scheduler chooses."""


@dataclass(frozen=True, kw_only=True)
class PartRequest:
    """A part for rendering: the request of its hold, its ranks in that order, and how each starts.

    `limits` are those under which ranks start; None in containers, which have their own.
    """

    request: HoldRequest
    ranks: tuple[int, ...]
    starts: tuple[RankStart, ...]
    limits: WorkerLimits | None = field(default_factory=WorkerLimits)

    def start_in(self, group: str) -> RankStart:
        """Return how the ranks of a node group start: all of them as its first one."""
        return next(
            start for start, need in zip(self.starts, self.request.ranks, strict=True) if need.node_group == group
        )


@dataclass(frozen=True, kw_only=True)
class RenderedHold:
    """The job file of a part, and per node group the scheduler's request and the worker's variables."""

    file_name: str
    text: str
    settings: Mapping[str, tuple[Setting, ...]]


def shown_words(words: Sequence[str]) -> tuple[str, ...]:
    """Return a command with `{python}` in place of the Python of this machine, since the site has its own."""
    return tuple("{python}" if word == sys.executable else word for word in words)


def program_setting(program: Sequence[str]) -> Setting:
    """Return the program of a rank, which the courier beside it starts by its `start.json`."""
    value = shlex.join(shown_words(program))
    return Setting(name="start.json#program", setting_class="training", value=value, passed_as="file", origin="agent")


def variable_settings(variables: Mapping[str, str]) -> Iterator[Setting]:
    """Yield the variables that the agent gives every worker."""
    for name, value in variables.items():
        yield Setting(name=name, setting_class="resources", value=value, passed_as="environment", origin="agent")
