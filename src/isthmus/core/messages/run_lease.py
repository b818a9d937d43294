"""`RunLease`: how long the workers of a site may run without contact with the server; a file of the agent's state.

The agent renews it only when the server has answered, and every worker ends itself once it has ended: so the server
knows, without hearing from a lost site, when nothing runs there any more (C. Gray, D. Cheriton: Leases, SOSP 1989).
Workers on the agent's machine share its clock. Elsewhere only the duration counts that was left at the writing.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from isthmus.core.base_model import FrozenModel, NonNegativeFloat
from isthmus.core.process.boot_clock import boot_id

NO_LIMIT_S = 1e15
"""End of a lease of a server that sets no limit."""
_MAX_BYTES = 4096


class RunLease(FrozenModel):
    """The lease of `lease_s` that ends at `until_s` (`boot_time_s`) in the machine's start `boot`.

    It was written at `written_s` of that clock.
    """

    boot: str
    lease_s: NonNegativeFloat
    until_s: NonNegativeFloat
    written_s: NonNegativeFloat = 0.0

    @property
    def is_of_this_machine(self) -> bool:
        """Whether the present start of this machine wrote it, so that `boot_time_s` here is its clock."""
        return self.boot == boot_id()

    @property
    def left_s(self) -> float:
        """What was left of it when it was written."""
        return max(0.0, self.until_s - self.written_s)


def write_run_lease(path: Path, lease: RunLease) -> None:
    """Replace the lease; without a flush to disk, since an agent of a later start writes another.

    Workers read it that run as other accounts.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(lease.model_dump_json(), encoding="utf-8")
    temporary.chmod(0o644)
    temporary.replace(path)


def read_run_lease(path: Path) -> RunLease | None:
    """Return the lease; None if it is missing or damaged: then it has ended."""
    try:
        with path.open("rb") as file:
            return RunLease.model_validate_json(file.read(_MAX_BYTES))
    except (OSError, ValidationError):
        return None
