"""`PlanningDesk`: asks the planner in a thread of its own, and hands its answers in as events."""

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
"""What `isthmus.control.placement.propose` does: plans of a job on what is free."""

PATIENCE_S = 12.0
"""How long an answer is waited for that somebody stands and waits for: twice fits a client's half minute."""

MOST_ASKING = 4
"""So many may stand and wait at once, so that enough threads are left for agents and for other users."""

_log = logging.getLogger("isthmus.server")


class PlanningDesk:
    """One request for plans at a time, in the order of asking.

    `file` is the operator's pool, `clock` gives seconds since the epoch, `hand_in` takes the answers, which
    may come too late; it must not raise.
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
        """Have a request answered; after `close` nothing happens."""
        if not self._ended:
            self._thread.submit(self._answer, request)

    def answer(self, request: MakePlans) -> PlanSet:
        """Return plans at once, in turn with what was asked before; nothing is handed in.

        Raises `ConflictError` where that takes longer than `PATIENCE_S` or `MOST_ASKING` wait already, and
        whatever the planner raises.
        """
        if self._ended:
            raise PlanningEndedError("the server is ending")
        if not self._asking.acquire(blocking=False):
            raise ConflictError(
                f"{MOST_ASKING} questions wait for the planner already", hint="ask again in a moment"
            )
        try:
            future = self._thread.submit(self._plans, request)
            return future.result(PATIENCE_S)
        except TimeoutError as error:
            future.cancel()
            raise ConflictError(
                f"the planner has not answered in {PATIENCE_S:g} s: others come first, or this job is long",
                hint="ask again in a moment",
            ) from error
        finally:
            self._asking.release()

    def close(self) -> None:
        """Wait for the request in work, and drop the others: the next server asks them again."""
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
            event = failed(now_s=self._clock(), reason=f"the planner broke: {error}")
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
    """Return the pool of `clusters` with the operator's chips and the links between them."""
    names = {cluster.name for cluster in clusters}
    links = tuple(link for link in file.links if {link.source, link.target} <= names) if file else ()
    return Pool(clusters=clusters, chips=file.chips if file else (), links=links)
