"""What the sites of a plan bring before a job starts there, and its weight in the ranking of plans. Pure.

Plans are ranked by the time from now to the end of the job: what its sites bring (all at once, the slowest counts),
then its steps. A job of a few steps starts where its files are; a long one goes where it trains fastest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from isthmus.control.placement.resources.storage_requirement import checkpoint_bytes
from isthmus.core.job import Job
from isthmus.core.messages.site_fetch import SiteFetch
from isthmus.core.plan import Plan
from isthmus.core.units import format_bytes, format_seconds
from isthmus.plan import ModelProfile

Fetches = Mapping[str, SiteFetch]
"""What clusters would have to bring, by name; those without an entry nothing."""


def with_bringing(plan: Plan, job: Job, profile: ModelProfile, fetches: Fetches) -> Plan:
    """Return the plan with what its clusters bring in prediction, assumptions and `why`."""
    if plan.predicted is None or not any(name in fetches for name in plan.clusters):
        return plan
    found = {name: _amount(plan, name, job, profile, fetches) for name in plan.clusters if name in fetches}
    found = {name: one for name, one in found.items() if one[0]}
    if not found:
        return plan
    parts = [f"brings {format_bytes(size)} to {name}, {format_seconds(took)}" for name, (size, took) in found.items()]
    notes = [_rate_note(name, fetches[name]) for name in found if not fetches[name].measured]
    update = {
        "bring_bytes": {name: size for name, (size, _) in found.items()},
        "bring_s": max(took for _, took in found.values()),
        "assumptions": (*plan.predicted.assumptions, *notes),
    }
    predicted = plan.predicted.model_copy(update=update)
    return plan.model_copy(update={"predicted": predicted, "why": "; ".join(filter(None, (plan.why, *parts)))})


def ready_to_end_s(plan: Plan, steps: int) -> float:
    """Return the predicted seconds from now to the end of the job's `steps`, if its chips are free."""
    predicted = plan.predicted
    return predicted.bring_s + steps * predicted.iteration_s if predicted else math.inf


def clusters_to_prefer(
    plans: Sequence[Plan], job: Job, profile: ModelProfile, fetches: Fetches, clusters: Sequence[str]
) -> tuple[str, ...]:
    """Return the clusters at which a job would start sooner than under the best of `plans`; none if that is all."""
    if not plans or not fetches:
        return ()
    best = with_bringing(plans[0], job, profile, fetches)
    wait_s = best.predicted.bring_s if best.predicted else 0.0
    if not wait_s:
        return ()
    sooner = [name for name in clusters if name not in fetches or fetches[name].seconds(reads_data=True) < wait_s]
    return tuple(sooner) if len(sooner) < len(clusters) else ()


def _amount(plan: Plan, cluster: str, job: Job, profile: ModelProfile, fetches: Fetches) -> tuple[int, float]:
    """Return the bytes that a cluster of the plan brings, and the seconds that they take."""
    reads, fetch = plan.reads_data(cluster), fetches[cluster]
    layers = {stage.layers: stage for stage in plan.stages if stage.cluster == cluster}
    kept = sum(checkpoint_bytes(stage, job, profile) for stage in layers.values()) // (job.checkpoints.keep + 1)
    return (
        fetch.num_bytes(reads_data=reads, checkpoint_bytes=kept),
        fetch.seconds(reads_data=reads, checkpoint_bytes=kept),
    )


def _rate_note(cluster: str, fetch: SiteFetch) -> str:
    return f"{cluster} has measured no rate of its own yet: it is assumed to fetch at {fetch.gbps:g} Gbit/s"
