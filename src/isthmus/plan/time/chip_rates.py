"""`with_chip_rates`: a calibration completed by the sustained rates that chips state, where nothing was measured.

A value that a calibration has, for the chip or in general, stays; the rates of a chip come before the defaults.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.core.chip import Chip
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.core.stack import Stack, find_stack
from isthmus.plan.profile.chosen_stack import chosen_stack
from isthmus.plan.time.calibration import Calibration, FittedParameter

RELATIVE = {"matmul_share": 0.12, "attention_share": 0.2, "link_share": 0.1, "network_share": 0.15}
"""Relative uncertainty of a share from a micro-benchmark of another machine: one shape, one node, one version."""

SLOWEST_CHIP = 1.035
"""Time of products on the slowest of 64 chips, which sets the pace of a step, over that on one measured alone.

Equal chips of a cluster differ by 8 % (P. Sinha et al., Not All GPUs Are Created Equal, SC 2022, abstract). Assumed:
that is the range of a box plot, 2.7 deviations to each side; the slowest of 64 lies 2.37 of them from the mean.
"""

ANY_KERNEL = "any"
"""Attention kernel of a stack that names none: no rates of micro-benchmarks are taken for it."""


def with_chip_rates(calibration: Calibration, plan: Plan, pool: Pool) -> Calibration:
    """Return `calibration` with the sustained rates of the plan's chips, for the kernels of the plan's stack."""
    if chosen_stack(plan).attention_kernel == ANY_KERNEL:
        return calibration
    groups = {(stage.cluster, stage.node_group) for stage in plan.stages}
    chips = {chip.name: chip for chip in (pool.chip(pool.node_group(*group)) for group in groups)}
    return complete_calibration(calibration, tuple(chips.values()), chosen_stack(plan))


def with_prior_rates(calibration: Calibration, runs: Sequence[tuple[Plan, Pool]], keys: Sequence[str]) -> Calibration:
    """Return `calibration` with those of `keys` that the chips of `runs` state: where a fit to the runs starts.

    A fit that starts from the defaults forgets the rates that the prediction without it uses.
    """
    completed = calibration
    for plan, pool in runs:
        completed = with_chip_rates(completed, plan, pool)
    stated = {key: completed.parameters[key] for key in keys if key in completed.parameters}
    return calibration.model_copy(update={"parameters": {**calibration.parameters, **stated}})


def complete_calibration(calibration: Calibration, chips: Sequence[Chip], stack: str | Stack) -> Calibration:
    """Return `calibration` with the sustained rates of `chips`, for the kernels of the stack."""
    kernel, added = find_stack(stack).attention_kernel, {}
    for chip in chips if kernel != ANY_KERNEL else ():
        for name, share in _shares(chip, kernel).items():
            key = f"{chip.name}/{name}"
            if name not in calibration.parameters and key not in calibration.parameters:
                added[key] = FittedParameter(value=share, relative=RELATIVE[name])
    if not added:
        return calibration
    return calibration.model_copy(update={"parameters": {**calibration.parameters, **added}})


def _shares(chip: Chip, kernel: str) -> dict[str, float]:
    """Return the shares of the data sheet's rates that micro-benchmarks of a chip reached."""
    rates = chip.sustained
    if rates is None:
        return {}
    found: dict[str, float] = {}
    if "bf16" in rates.matmul_flop_per_s:
        found["matmul_share"] = rates.matmul_flop_per_s["bf16"] / chip.flop_per_s("bf16") / SLOWEST_CHIP
    attention = rates.attention_rate(kernel)
    if attention is not None:
        found["attention_share"] = attention.forward_flop_per_s / chip.flop_per_s("bf16")
    if rates.link_bytes_per_s:
        found["link_share"] = rates.link_bytes_per_s / chip.in_node_link.bandwidth_bytes_per_s
    if rates.network_share:
        found["network_share"] = rates.network_share
    return found
