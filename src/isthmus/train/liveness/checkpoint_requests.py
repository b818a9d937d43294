"""`CheckpointRequests`: an agent's requests for a verified checkpoint, and this rank's replies.

A request from one site's agent is enough: it travels with the gradient norm that all ranks sum at the end of
each step (`Communicator.checkpoint_requested`), so that all ranks save after the same step.
"""

from __future__ import annotations

from isthmus.core.messages.agent_messages import VerifiedCheckpoint
from isthmus.core.messages.worker_folder import WorkerFolder

RETRY_STEPS = 10
"""Steps between an invalid checkpoint and the next attempt to save one."""


class CheckpointRequests:
    """The requests in one worker's folder; a verified checkpoint fulfils all earlier requests."""

    def __init__(self, folder: WorkerFolder) -> None:
        self._folder = folder
        self._verified_step, self._retry_step = 0, 0

    def is_requested(self, step: int) -> bool:
        """Return whether, after `step` steps, the agent requests a newer verified checkpoint."""
        request = self._folder.read_checkpoint_request()
        return request is not None and request.after >= self._verified_step and step >= self._retry_step

    def report_verified(self, step: int, num_bytes: int) -> None:
        """Report to the agent that the checkpoint after `step` steps is verified, and its size here."""
        try:
            self._folder.write_verified_checkpoint(VerifiedCheckpoint(step=step, num_bytes=num_bytes))
        except OSError:
            self.report_failed(step)
            return
        self._verified_step = step

    def report_failed(self, step: int) -> None:
        """Record that the checkpoint after `step` steps is invalid; retry after `RETRY_STEPS`."""
        self._retry_step = step + RETRY_STEPS
