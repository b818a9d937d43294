"""`BackgroundWriter`: fire-and-forget actor requests, batched into the next log flush.

Without another flush they are executed after `BATCH_WINDOW_S`. Callers never block.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from isthmus.control.service.coordinator_actor import ActorRequest, CoordinatorActor
from isthmus.core.errors import IsthmusError

BATCH_WINDOW_S = 0.002
"""How long a request waits for others to share a flush with."""

_log = logging.getLogger("isthmus.server")


class BackgroundWriter:
    """Queues and executes requests in the background; thread-safe. Failures are logged."""

    def __init__(self, actor: CoordinatorActor) -> None:
        self._actor = actor
        self._lock = threading.Lock()
        self._waiting: list[tuple[str, ActorRequest]] = []
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="unhurried")

    def enqueue(self, description: str, request: ActorRequest) -> None:
        """Queue a request; `description` names it in the log if it fails."""
        self._actor.enqueue([request])
        with self._lock:
            self._waiting.append((description, request))
            first = len(self._waiting) == 1
        if first:
            self._executor.submit(self._execute_waiting)

    def close(self) -> None:
        """Execute all queued requests; `enqueue` must not be called afterwards."""
        self._executor.shutdown(wait=True)

    def _execute_waiting(self) -> None:
        time.sleep(BATCH_WINDOW_S)
        with self._lock:
            waiting, self._waiting = self._waiting, []
        self._actor.complete([request for _, request in waiting])
        for what, request in waiting:
            try:
                request.value()
            except IsthmusError as error:
                _log.warning("%s: %s", what, error)
            except Exception:
                _log.exception("%s", what)
