"""`Guard`: an agent's requests for a verified checkpoint, and this rank's replies.

A request from one site's agent is enough: it travels with the gradient norm that all ranks sum at the end of
each step (`Exchange.wish`), so that all ranks save after the same step.
"""

from __future__ import annotations

from isthmus.core.messages.agent_messages import Protection
from isthmus.core.messages.worker_folder import WorkerFolder

RETRY_STEPS = 10
"""Steps between an invalid checkpoint and the next attempt to save one."""


class Guard:
    """The requests in one worker's folder; a verified checkpoint fulfils all earlier requests."""

    def __init__(self, folder: WorkerFolder) -> None:
        self._folder = folder
        self._protected_step, self._not_before = 0, 0

    def asked(self, step: int) -> bool:
        """Return whether, after `step` steps, the agent requests a newer verified checkpoint."""
        request = self._folder.read_protect()
        return request is not None and request.after >= self._protected_step and step >= self._not_before

    def protected(self, step: int, num_bytes: int) -> None:
        """Report to the agent that the checkpoint after `step` steps is verified, and its size here."""
        try:
            self._folder.write_protected(Protection(step=step, num_bytes=num_bytes))
        except OSError:
            self.failed(step)
            return
        self._protected_step = step

    def failed(self, step: int) -> None:
        """Record that the checkpoint after `step` steps is invalid; retry after `RETRY_STEPS`."""
        self._not_before = step + RETRY_STEPS
