"""`PlannerQueue`: runs planning requests in a background thread and returns the results as events."""

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
"""Signature of `isthmus.control.placement.propose_plans`: plans of a job on the free resources."""

INTERACTIVE_TIMEOUT_S = 12.0
"""Timeout of an interactive request; two of them fit into a client's timeout of 30 s."""

MAX_INTERACTIVE_REQUESTS = 4
"""Largest number of waiting interactive requests, so that threads remain for agents and other users."""

_log = logging.getLogger("isthmus.server")


class PlannerQueue:
    """Serves planning requests one at a time, first come first served.

    `pool_file` is the operator's pool, `clock` returns seconds since the Unix epoch. `on_result` receives the result
    events, which may be outdated; it must not raise.
    """

    def __init__(
        self,
        planner: Planner,
        pool_file: Pool | None,
        clock: Callable[[], float],
        on_result: Callable[[Event], None],
        *,
        interactive_timeout_s: float = INTERACTIVE_TIMEOUT_S,
        max_interactive_requests: int = MAX_INTERACTIVE_REQUESTS,
    ) -> None:
        self.planner = planner
        self._pool_file, self._clock, self._on_result = pool_file, clock, on_result
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="planner")
        self._interactive_timeout_s, self._max_interactive = interactive_timeout_s, max_interactive_requests
        self._interactive_slots = threading.BoundedSemaphore(max_interactive_requests)
        self._closed = False

    def enqueue(self, request: MakePlans) -> None:
        """Queue a request; ignored after `close`."""
        if not self._closed:
            self._executor.submit(self._run_queued, request)

    def plan_now(self, request: MakePlans) -> PlanSet:
        """Wait for the plans of a request, queued behind earlier ones; no event results.

        Raises `ConflictError` after `interactive_timeout_s` or if `max_interactive_requests` already wait, and the
        planner's errors.
        """
        if self._closed:
            raise PlanningEndedError("the server is shutting down")
        if not self._interactive_slots.acquire(blocking=False):
            raise ConflictError(
                f"the planner is busy: {self._max_interactive} requests already wait",
                hint="retry in a moment",
            )
        try:
            future = self._executor.submit(self._make_plans, request)
            return future.result(self._interactive_timeout_s)
        except TimeoutError as error:
            future.cancel()
            raise ConflictError(
                f"the planner has not answered within {self._interactive_timeout_s:g} s: "
                "it is busy, or this search is long",
                hint="retry in a moment",
            ) from error
        finally:
            self._interactive_slots.release()

    def close(self) -> None:
        """Wait for the running request and drop the others; the next leader repeats them."""
        self._closed = True
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _run_queued(self, request: MakePlans) -> None:
        failed = functools.partial(PlanningFailed, job_id=request.job_id, round=request.round)
        event: Event
        try:
            plans = self._make_plans(request)
            event = PlansMade(now_s=self._clock(), job_id=request.job_id, round=request.round, plans=plans)
        except PlanningEndedError:
            return
        except IsthmusError as error:
            event = failed(now_s=self._clock(), reason=str(error))
        except Exception as error:
            _log.exception("planning job %s", request.job_id, extra={"job": request.job_id})
            event = failed(now_s=self._clock(), reason=f"the planner failed: {error}")
        self._on_result(event)

    def _make_plans(self, request: MakePlans) -> PlanSet:
        if not request.clusters:
            return PlanSet(plans=(), refused=(Refusal(clusters=(), reason="no cluster is connected"),))
        pool = assemble_pool(request.clusters, self._pool_file)
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


def assemble_pool(clusters: tuple[Cluster, ...], pool_file: Pool | None) -> Pool:
    """Return the pool of `clusters` with the operator's chip definitions and the links between them."""
    names = {cluster.name for cluster in clusters}
    if pool_file is None:
        return Pool(clusters=clusters)
    links = tuple(link for link in pool_file.links if {link.source, link.target} <= names)
    return Pool(clusters=clusters, chips=pool_file.chips, links=links, currency=pool_file.currency)
