"""`Guard`: an agent's requests for a checkpoint that survives the run, and this rank's answers.

Ranks are at several sites, and one site's agent is enough to ask: the wish travels with the gradient norm
that all ranks sum at the end of each step, so all save after the same step (`messages/exchange.py`).
"""

from __future__ import annotations

from isthmus.core.messages.agent_messages import Protection
from isthmus.core.messages.worker_folder import WorkerFolder

RETRY_STEPS = 10
"""How many steps a rank trains on after a checkpoint that was not whole, before it asks for another."""


class Guard:
    """The requests in one worker's folder. A checkpoint answers every request that was made before it."""

    def __init__(self, folder: WorkerFolder) -> None:
        self._folder = folder
        self._protected_step, self._not_before = 0, 0

    def asked(self, step: int) -> bool:
        """Tell whether, `step` steps being done, the agent wants a newer protected checkpoint."""
        request = self._folder.read_protect()
        return request is not None and request.after >= self._protected_step and step >= self._not_before

    def protected(self, step: int, num_bytes: int) -> None:
        """Tell the agent that the checkpoint after `step` steps was read back, and its size here."""
        try:
            self._folder.write_protected(Protection(step=step, num_bytes=num_bytes))
        except OSError:
            self.failed(step)
            return
        self._protected_step = step

    def failed(self, step: int) -> None:
        """Note that the checkpoint after `step` steps was not whole."""
        self._not_before = step + RETRY_STEPS
