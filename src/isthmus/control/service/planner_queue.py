"""`PlanningDesk`: runs planning requests in a background thread and returns the results as events."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from isthmus.control.placement import PlanRequest
from isthmus.control.service.planner_process import PlanningEndedError
from isthmus.control.state.events import Event, MakePlans, PlanningFailed, PlansMade
from isthmus.core.errors import ConflictError, IsthmusError
from isthmus.core.plan import PlanSet, Refusal
from isthmus.core.pool import Cluster, Pool

Planner = Callable[[PlanRequest], PlanSet]
"""Signature of `isthmus.control.placement.propose`: plans of a job on the free resources."""

PATIENCE_S = 12.0
"""Timeout of an interactive request; two of them fit into a client's timeout of 30 s."""

MOST_ASKING = 4
"""Largest number of waiting interactive requests, so that threads remain for agents and other users."""

_log = logging.getLogger("isthmus.server")


class PlanningDesk:
    """Serves planning requests one at a time, first come first served.

    `file` is the operator's pool, `clock` returns seconds since the Unix epoch. `hand_in` receives the result
    events, which may be outdated; it must not raise.
    """

    def __init__(
        self,
        planner: Planner,
        file: Pool | None,
        clock: Callable[[], float],
        hand_in: Callable[[Event], None],
    ) -> None:
        self.planner = planner
        self._file, self._clock, self._hand_in = file, clock, hand_in
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="planner")
        self._asking = threading.BoundedSemaphore(MOST_ASKING)
        self._ended = False

    def ask(self, request: MakePlans) -> None:
        """Queue a request; ignored after `close`."""
        if not self._ended:
            self._thread.submit(self._answer, request)

    def answer(self, request: MakePlans) -> PlanSet:
        """Wait for the plans of a request, queued behind earlier ones; no event results.

        Raises `ConflictError` after `PATIENCE_S` or if `MOST_ASKING` requests already wait, and the planner's
        errors.
        """
        if self._ended:
            raise PlanningEndedError("the server is shutting down")
        if not self._asking.acquire(blocking=False):
            raise ConflictError(
                f"the planner is busy: {MOST_ASKING} requests already wait", hint="retry in a moment"
            )
        try:
            future = self._thread.submit(self._plans, request)
            return future.result(PATIENCE_S)
        except TimeoutError as error:
            future.cancel()
            raise ConflictError(
                f"the planner has not answered within {PATIENCE_S:g} s: it is busy, or this search is long",
                hint="retry in a moment",
            ) from error
        finally:
            self._asking.release()

    def close(self) -> None:
        """Wait for the running request and drop the others; the next leader repeats them."""
        self._ended = True
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _answer(self, request: MakePlans) -> None:
        failed = functools.partial(PlanningFailed, job_id=request.job_id, round=request.round)
        event: Event
        try:
            plans = self._plans(request)
            event = PlansMade(now_s=self._clock(), job_id=request.job_id, round=request.round, plans=plans)
        except PlanningEndedError:
            return
        except IsthmusError as error:
            event = failed(now_s=self._clock(), reason=str(error))
        except Exception as error:
            _log.exception("planning job %s", request.job_id, extra={"job": request.job_id})
            event = failed(now_s=self._clock(), reason=f"the planner failed: {error}")
        self._hand_in(event)

    def _plans(self, request: MakePlans) -> PlanSet:
        if not request.clusters:
            return PlanSet(plans=(), refused=(Refusal(clusters=(), reason="no cluster is connected"),))
        pool = assemble(request.clusters, self._file)
        submission = request.submission
        return self.planner(
            PlanRequest(
                job=submission.job,
                model=submission.model,
                pool=pool,
                free_chips=request.free_chips,
                free_storage_bytes=request.free_storage_bytes,
                free_gbps=request.free_gbps,
            )
        )


def assemble(clusters: tuple[Cluster, ...], file: Pool | None) -> Pool:
    """Return the pool of `clusters` with the operator's chip definitions and the links between them."""
    names = {cluster.name for cluster in clusters}
    links = tuple(link for link in file.links if {link.source, link.target} <= names) if file else ()
    return Pool(clusters=clusters, chips=file.chips if file else (), links=links)
