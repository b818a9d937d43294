"""`Unhurried`: requests to the actor for which nobody waits share a flush with those that come next.

Where none come they are settled after `COMPANY_S`. Whoever hands one in goes on at once.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from isthmus.control.service.actor import Actor, Request
from isthmus.core.errors import IsthmusError

COMPANY_S = 0.002
"""So long others are waited for to share a flush with."""

_log = logging.getLogger("isthmus.server")


class Unhurried:
    """May be used from any thread. What comes too late, or cannot be stored now, is logged."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._lock = threading.Lock()
        self._waiting: list[tuple[str, Request]] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="unhurried")

    def put(self, what: str, request: Request) -> None:
        """Have a request settled soon; `what` names it in the log where it fails."""
        self._actor.put([request])
        with self._lock:
            self._waiting.append((what, request))
            first = len(self._waiting) == 1
        if first:
            self._thread.submit(self._settle)

    def close(self) -> None:
        """Settle what there is; nothing may be put in any more."""
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
