"""What a worker's exit status means: where the cause of its failure lies, and how to describe it."""

from __future__ import annotations

import signal

from isthmus.core.errors import InputError, PeerError, PlanError, ProtocolError
from isthmus.core.messages.agent_messages import Fault

_PERMANENT = {kind.exit_code for kind in (InputError, PlanError, ProtocolError)}
_STOPPED = {128 + signal.SIGTERM, 128 + signal.SIGKILL}


def fault_of(exit_status: int | None) -> Fault:
    """Return where the cause lies when a worker ends with `exit_status` (see `isthmus.core.errors`).

    `permanent`: wrong input, a plan that cannot be executed, another version; another attempt would end in
    the same way. `peer`: it lost a peer, so the cause is elsewhere. `own`: everything else, signals included.
    """
    if exit_status in _PERMANENT:
        return "permanent"
    return "peer" if exit_status == PeerError.exit_code else "own"


def was_stopped(exit_status: int | None) -> bool:
    """Tell whether a worker ended by the signal that it was asked to stop with."""
    return exit_status in _STOPPED


def describe_exit(exit_status: int | None) -> str:
    """Return how a worker ended, as the end of a sentence about it."""
    if exit_status is not None and exit_status > 128:
        return f"was ended by signal {exit_status - 128}"
    return f"ended with status {exit_status}"
