"""`Unhurried`: fire-and-forget actor requests, batched into the next log flush.

Without another flush they are executed after `COMPANY_S`. Callers never block.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from isthmus.control.service.actor import Actor, Request
from isthmus.core.errors import IsthmusError

COMPANY_S = 0.002
"""How long a request waits for others to share a flush with."""

_log = logging.getLogger("isthmus.server")


class Unhurried:
    """Queues and executes requests in the background; thread-safe. Failures are logged."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._lock = threading.Lock()
        self._waiting: list[tuple[str, Request]] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="unhurried")

    def put(self, what: str, request: Request) -> None:
        """Queue a request; `what` names it in the log if it fails."""
        self._actor.put([request])
        with self._lock:
            self._waiting.append((what, request))
            first = len(self._waiting) == 1
        if first:
            self._thread.submit(self._settle)

    def close(self) -> None:
        """Execute all queued requests; `put` must not be called afterwards."""
        self._thread.shutdown(wait=True)

    def _settle(self) -> None:
        time.sleep(COMPANY_S)
        with self._lock:
            waiting, self._waiting = self._waiting, []
        self._actor.finish([request for _, request in waiting])
        for what, request in waiting:
            try:
                request.value()
            except IsthmusError as error:
                _log.warning("%s: %s", what, error)
            except Exception:
                _log.exception("%s", what)
