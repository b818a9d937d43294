"""Interprets a worker's exit status: the kind of fault and a description."""

from __future__ import annotations

import signal

from isthmus.core.errors import InputError, PeerError, PlanError, ProtocolError
from isthmus.core.messages.agent_messages import FailureCause
from isthmus.core.messages.worker_folder import RUN_LEASE_ENDED

_PERMANENT_STATUSES = {kind.exit_code for kind in (InputError, PlanError, ProtocolError)}
_STOPPED_STATUSES = {128 + signal.SIGTERM, 128 + signal.SIGKILL}


def fault_of(exit_status: int | None) -> FailureCause:
    """Return the kind of fault of a worker that ended with `exit_status` (see `isthmus.core.errors`).

    `permanent`: invalid input, an impossible plan or another version, so a retry would fail in the same way.
    `peer`: it lost a peer, so the cause is elsewhere. `own`: everything else, signals included.
    """
    if exit_status in _PERMANENT_STATUSES:
        return "permanent"
    return "peer" if exit_status == PeerError.exit_code else "own"


def was_stopped(exit_status: int | None) -> bool:
    """Tell whether a worker was ended by SIGTERM or SIGKILL."""
    return exit_status in _STOPPED_STATUSES


def describe_exit(exit_status: int | None) -> str:
    """Return how a worker ended, as the predicate of a sentence."""
    if exit_status == RUN_LEASE_ENDED:
        return "ended itself: its site had no contact with the server until its lease ended"
    if exit_status is not None and exit_status > 128:
        return f"was ended by signal {exit_status - 128}"
    return f"ended with status {exit_status}"
