"""`render_local`: the script with which the agent starts a part's workers as processes of its own machine."""

from __future__ import annotations

import shlex
from pathlib import Path

from isthmus.agent.adapters.local_adapter import confined_worker, worker_variables, wrapper_words
from isthmus.agent.adapters.rendered_hold import (
    WORKER_FOLDER,
    PartRequest,
    RenderedHold,
    shown_words,
    variable_settings,
)
from isthmus.core.pool import Cluster
from isthmus.render import Setting

JOB_FILE = "job.sh"
_HEAD = """#!/bin/sh
# Part {job}, attempt {attempt}, at cluster {cluster}: the commands of the agent.
# Words in braces stand for what is known at the start only: {{worker_folder}}, a rank's folder; {{python}}, the agent's
# interpreter; {{cards}}, the rank's cards. A worker also has the usual variables of the agent.
"""


def render_local(cluster: Cluster, part: PartRequest) -> RenderedHold:
    """Return the command of each rank with its variables."""
    request, place = part.request, Path(WORKER_FOLDER)
    lines = [_HEAD.format(job=request.job, attempt=request.attempt, cluster=cluster.name)]
    settings = dict[str, tuple[Setting, ...]]()
    for rank, start, need in zip(part.ranks, part.starts, request.ranks, strict=True):
        variables = worker_variables(place, {}, start, part.limits)
        words = wrapper_words(place, confined_worker(place, start.command, part.limits))
        prefix = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        lines.append(f"# rank {rank}\n{prefix} {shlex.join(shown_words(words))}\n")
        settings.setdefault(need.node_group, tuple(variable_settings(variables)))
    return RenderedHold(file_name=JOB_FILE, text="\n".join(lines), settings=settings)
