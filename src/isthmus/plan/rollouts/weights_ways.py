"""`weights_ways`: by which clusters a version comes to each that decodes, and what that takes.

Sites relay: a version crosses each link at most once, in chunks that are sent on as they arrive, so that a way takes
what its slowest link takes. Each site gets the widest way from the cluster that trains.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from isthmus.core.job import Job
from isthmus.core.pool import Pool
from isthmus.plan.profile.layer_profile import ModelProfile
from isthmus.plan.rollouts.decode_rates import element_bytes
from isthmus.plan.time.calibration import Calibration
from isthmus.plan.time.plan_links import reached_bytes_per_s
from isthmus.sim import WeightsWay

CODED_BYTES_PER_WEIGHT, CODED_RATE, CODED_POWER = 0.0118, 1e-6, 0.72
"""Bytes a bf16 weight takes in a version after a step of Adam at a rate, and how they grow with the rate.

1.4 % of the weights change at 1e-6 and take .843 bytes each, 9.5 % at 1e-5 and .657 (`docs/benchmarks/rl.md`).
"""
CODED_FP32_BYTES_PER_WEIGHT = 1.36
"""The same of a fp32 weight, at the same rate: nearly all change, by twice as many steps at twice the rate."""
CODE_BYTES_PER_S = {2: 0.5e9, 4: 0.05e9}
"""Bytes of weights that a core codes a second, by the bytes of one."""


@dataclass(frozen=True, kw_only=True)
class LinkRate:
    """What the transport reaches on a link, and its delay."""

    bytes_per_s: float
    delay_s: float


@dataclass(frozen=True, kw_only=True)
class VersionWay:
    """The clusters that a version passes to one that decodes, both included, and what the way takes."""

    clusters: tuple[str, ...]
    way: WeightsWay


def link_rates(pool: Pool, calibration: Calibration) -> dict[tuple[str, str], LinkRate]:
    """Return the rate of every link of a pool, by its ends."""
    known = {(one.source, one.target): one for one in pool.links}
    return {
        (a, b): LinkRate(
            bytes_per_s=reached_bytes_per_s(calibration, link, known.get((b, a))),
            delay_s=link.delay_s + calibration.value("message_s", f"{a}>{b}"),
        )
        for (a, b), link in known.items()
    }  # fmt: skip


def version_bytes(profile: ModelProfile, job: Job) -> float:
    """Return the bytes of a version as it is sent: the changes of its weights."""
    size, faster = element_bytes(job), job.training.learning_rate / CODED_RATE
    if size == 4:
        each = max(CODED_FP32_BYTES_PER_WEIGHT + math.log2(faster) / 8, 0.0)
    else:
        each = CODED_BYTES_PER_WEIGHT * math.pow(faster, CODED_POWER)
    return min(float(size), each) * profile.num_parameters


def coding_s(profile: ModelProfile, job: Job) -> float:
    """Return the seconds in which a core codes or applies the changes of a version."""
    size = element_bytes(job)
    return size * profile.num_parameters / CODE_BYTES_PER_S[size]


def weights_ways(
    holder: str,
    sites: Collection[str],
    rates: Mapping[tuple[str, str], LinkRate],
    sent_bytes: float,
    coded_s: float,
) -> dict[str, VersionWay]:
    """Return the widest way from `holder` to each of `sites` that it has one to, over sites alone.

    The changes are coded and applied, in `coded_s`, while those that are coded are sent.
    """
    width, delay_s = {holder: math.inf}, {holder: 0.0}
    way: dict[str, tuple[str, ...]] = {holder: (holder,)}
    open_sites = {holder}
    done: set[str] = set()
    while open_sites - done:
        here = max(open_sites - done, key=lambda one: (width[one], -delay_s[one], one))
        done.add(here)
        for other in sites:
            link = rates.get((here, other))
            if link is None or other in done:
                continue
            wide, late_s = min(width[here], link.bytes_per_s), delay_s[here] + link.delay_s
            if other not in width or (wide, -late_s) > (width[other], -delay_s[other]):
                width[other], delay_s[other], way[other] = wide, late_s, (*way[here], other)
                open_sites.add(other)
    return {
        name: VersionWay(
            clusters=way[name],
            way=WeightsWay(occupied_s=max(sent_bytes / width[name], coded_s), delay_s=delay_s[name]),
        )
        for name in sites
        if name in way
    }  # fmt: skip
