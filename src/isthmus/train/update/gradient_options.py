"""`GradientOptions`: how a run sums gradients, from the job's `runtime`; what cannot be is refused before start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.comm.group.isthmus_group import BACKEND
from isthmus.comm.group.passing.passing_sums import PassingOptions
from isthmus.core.errors import InputError, PlanError
from isthmus.core.loopback import is_loopback
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.core.pool import Aggregators
from isthmus.switch import MAX_INTEGERS, MAX_WORKERS

PASSING = "passing"
INTEGER_FORMATS = ("scaled-int32", "scaled-int16", "block-int8")


@dataclass(frozen=True, kw_only=True)
class GradientOptions:
    """A named `strategy`, or a `wire_format` of the default one; None: the default, in fp32.

    `passing` belongs to the strategy of that name. With `error_feedback` the rounding error of a sum is added to the
    next one; it starts at zero, and again with each new process group.
    """

    strategy: str | None = None
    wire_format: str | None = None
    passing: PassingOptions | None = None

    @property
    def error_feedback(self) -> bool:
        """Whether rounding errors are kept for the next sum."""
        return self.wire_format == "block-int8"

    @property
    def needs_finite(self) -> bool:
        """Whether sums take integers, which cannot express NaN and infinity."""
        return self.passing is not None or self.wire_format in INTEGER_FORMATS


def gradient_options(spec: WorkerSpec, switch_key: bytes | None) -> GradientOptions:
    """Return the options of the run of `spec`; `switch_key` is that of its packets to switches."""
    runtime = spec.job.runtime
    if runtime.synchronisation != PASSING:
        return GradientOptions(strategy=runtime.synchronisation, wire_format=runtime.wire_format)
    passing = PassingOptions(
        switches=tuple(_host_and_port(address) for one in spec.switches for address in one.addresses),
        job=spec.run,
        key=switch_key or b"",
        host=spec.host,
        part_integers=min([MAX_INTEGERS, *(one.slot_bytes // 4 for one in spec.switches)]),
    )
    return GradientOptions(strategy=PASSING, passing=passing)


def check_gradient_options(spec: WorkerSpec) -> None:
    """Raise `PlanError` where this runtime cannot sum gradients as the job says."""
    runtime, clusters = spec.job.runtime, spec.plan.clusters
    asked = runtime.synchronisation or runtime.wire_format
    name = "synchronisation" if runtime.synchronisation else "wire_format"
    if asked is None:
        return
    if spec.backend != BACKEND:
        raise PlanError(
            f"the run asks for {name} '{asked}', which a group of torch itself ({spec.backend}) does not have",
            hint=f"leave runtime.{name} out, or run with the backend {BACKEND}",
        )
    if spec.plan.overlap_gradients and (asked == PASSING or asked in INTEGER_FORMATS):
        raise PlanError(
            f"the plan fixes overlap_gradients to True, and {name} '{asked}' sums integers, which begins when all "
            "gradients are known to be finite",
            hint=f"remove overlap_gradients, or leave runtime.{name} out",
        )
    if asked != PASSING:
        return
    if not any(one.addresses for one in spec.switches):
        raise PlanError(
            f"the run asks for synchronisation 'passing', and none of the clusters {', '.join(clusters)} states the "
            "address of a switch",
            hint="add `aggregators: [{kind: switch, addresses: [HOST:PORT]}]` to one of them, or choose psring",
        )
    small = [one.slot_bytes for one in spec.switches if one.slot_bytes < 4]
    if small:
        raise PlanError(f"a switch of slots of {small[0]} bytes holds no integer", hint="state slot_bytes of 4 or more")
    if len(clusters) > MAX_WORKERS:
        raise PlanError(
            f"the run asks for synchronisation 'passing' over {len(clusters)} clusters",
            hint=f"a switch sums for at most {MAX_WORKERS}: choose psring",
        )


def check_switch_key(switches: Sequence[Aggregators], *, has_key: bool) -> None:
    """Raise `InputError` if one of `switches` is beyond this machine and the run has no key for it."""
    far = [one for of in switches for one in of.addresses if not is_loopback(_host_and_port(one)[0])]
    if far and not has_key:
        raise InputError(
            f"no key for the switch at {far[0]}",
            hint="start the server with --switch-key-file, and the switch with the same secret as --pool-key-file",
        )


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
