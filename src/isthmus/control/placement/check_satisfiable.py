"""Check that a job's constraints are satisfiable: otherwise it would wait forever or fail when planned."""

from __future__ import annotations

import math

from isthmus.core.errors import InputError
from isthmus.core.job import Job, ParallelDegrees, PlacementConstraints
from isthmus.core.model import Model
from isthmus.core.pool import Cluster, Pool
from isthmus.core.stack import DEFAULT_STACK, find_stack

NO_FIXED_DEGREES = ParallelDegrees()
"""A job that fixes no degree."""


def check_degrees(job: Job, model: Model) -> None:
    """Raise if the job's fixed degrees exceed `max_chips` or do not suit its model or the runtime.

    Raises `InputError`, `PlanError`, or `ModelError` for a model that cannot be profiled.
    """
    stack = find_stack(job.stack).name
    if stack != DEFAULT_STACK:
        raise InputError(
            f"stack {stack}: the workers of a pool run {DEFAULT_STACK}",
            hint="leave `stack` out; `isthmus plan` and `isthmus export` make plans for other frameworks",
        )
    if job.parallel == NO_FIXED_DEGREES:
        return
    from isthmus.plan import DATA_SHEET, SearchLimits, TrainingWorkload, job_limits, profile_model  # slow to load

    degrees = {name: value for name, value in job.parallel if value is not None and name != "ep"}
    chips, max_chips = math.prod(degrees.values()), job.placement.max_chips
    if max_chips is not None and chips > max_chips:
        product = " x ".join(f"{name} {value}" for name, value in degrees.items())
        raise InputError(
            f"parallel requires {chips} chips ({product}), placement.max_chips allows {max_chips}",
            hint="raise max_chips, or lower a degree",
        )
    training = job.training
    task = TrainingWorkload(
        profile=profile_model(model),
        sequence_length=training.sequence_length,
        precision=training.precision,
        calibration=DATA_SHEET,
    )
    job_limits(SearchLimits(executable=True), job, task)


def check_clusters(placement: PlacementConstraints, joined: tuple[Cluster, ...], file: Pool | None) -> None:
    """Raise `InputError` if no cluster of the pool satisfies all constraints.

    `joined` are the clusters whose agents ever reported. While no cluster is known, nothing is checked.
    """
    known = (*joined, *(file.clusters if file else ()))
    if not known:
        return
    admitted = [one for one in known if placement.admits(one.name, one.owner, one.region)]
    if not admitted:
        raise InputError(
            "placement: no cluster of the pool satisfies clusters, owners and regions together",
            hint="`isthmus pool` shows each cluster's owner and region",
        )
    if not any(placement.may_read_data(one.owner, one.region) for one in admitted):
        raise InputError(
            "placement: no admitted cluster may read the training data (data_owners, data_regions)",
            hint="the first and the last stage read it: admit a cluster with such an owner and region",
        )
