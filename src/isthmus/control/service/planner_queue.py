"""`PlannerQueue`: runs planning requests in a background thread and returns the results as events."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Container, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from isthmus.control.algorithms.fair_order import FairOrder, Place
from isthmus.control.placement import PlanRequest, planned_clusters
from isthmus.control.service.planner_process import PlanningEndedError
from isthmus.control.state.events import Event, MakePlans, PlanningFailed, PlansMade
from isthmus.control.state.indexes import PRIORITY_RANK
from isthmus.core.errors import ConflictError, IsthmusError
from isthmus.core.plan import PlanSet, Refusal
from isthmus.core.pool import Cluster, Link, Pool

Planner = Callable[[PlanRequest], PlanSet]
"""Signature of `isthmus.control.placement.propose_plans`: plans of a job on the free resources."""

ValueT = TypeVar("ValueT")

INTERACTIVE_TIMEOUT_S = 12.0
"""Timeout of an interactive request; two of them fit into a client's timeout of 30 s."""

MAX_INTERACTIVE_REQUESTS = 4
"""Largest number of waiting interactive requests, so that threads remain for agents and other users."""

MAX_INTERACTIVE_PER_USER = 2
"""Largest number of waiting interactive requests of one user."""

_log = logging.getLogger("isthmus.server")


@dataclass(frozen=True, kw_only=True)
class _Task:
    """A queued request; `answer` is set for an interactive one."""

    request: MakePlans
    place: Place
    answer: Future[PlanSet] | None = None


class PlannerQueue:
    """Serves planning requests, `num_workers` at a time: by priority, and within a priority users take turns.

    With several workers one is always left to other users: a user has at most `num_workers - 1` searches at a time.

    Of each job only the latest request is kept, and planned if `is_wanted` still returns True. `pool_file` is the
    operator's pool, `clock` returns seconds since the Unix epoch. `on_result` receives the result events, which may be
    outdated; it must not raise.
    """

    def __init__(
        self,
        planner: Planner,
        pool_file: Pool | None,
        clock: Callable[[], float],
        on_result: Callable[[Event], None],
        *,
        num_workers: int = 1,
        is_wanted: Callable[[MakePlans], bool] = lambda _: True,
        interactive_timeout_s: float = INTERACTIVE_TIMEOUT_S,
        max_interactive_requests: int = MAX_INTERACTIVE_REQUESTS,
    ) -> None:
        self.planner = planner
        self._pool_file, self._clock, self._on_result, self._is_wanted = pool_file, clock, on_result, is_wanted
        self._interactive_timeout_s, self._max_interactive = interactive_timeout_s, max_interactive_requests
        self._interactive: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._order, self._tasks, self._numbers = FairOrder(), dict[int, _Task](), itertools.count(1)
        self._number_by_job: dict[str, int] = {}
        self._num_workers, self._searches = num_workers, Counter[str]()
        self._closed = False
        self._threads: list[threading.Thread] = []

    def enqueue(self, request: MakePlans) -> None:
        """Queue a request in place of an earlier one of the same job; ignored after `close`."""
        with self._changed:
            self._drop(self._number_by_job.get(request.job_id, 0))
            self._number_by_job[request.job_id] = self._add(request, None)

    def plan_now(self, request: MakePlans) -> PlanSet:
        """Wait for the plans of a request, in its user's turn; no event results.

        Raises `ConflictError` after `interactive_timeout_s` or if too many requests already wait, and the planner's
        errors.
        """
        answer: Future[PlanSet] = Future()
        with self._changed:
            if self._closed:
                raise PlanningEndedError("the server is shutting down")
            self._check_interactive(request.user)
            self._interactive[request.user] += 1
            number = self._add(request, answer)
        try:
            return answer.result(self._interactive_timeout_s)
        except TimeoutError as error:
            raise ConflictError(
                f"the planner has not answered within {self._interactive_timeout_s:g} s: "
                "it is busy, or this search is long",
                hint="retry in a moment",
            ) from error
        finally:
            with self._changed:
                self._drop(number)
                self._interactive -= Counter({request.user: 1})

    def close(self) -> None:
        """Wait for the running request and drop the others; the next leader repeats them."""
        with self._changed:
            self._closed = True
            waiting = [task.answer for task in self._tasks.values() if task.answer is not None]
            self._changed.notify_all()
        for answer in waiting:
            answer.set_exception(PlanningEndedError("the server is shutting down"))
        for thread in self._threads:
            thread.join()

    def _check_interactive(self, user: str) -> None:
        """Raise `ConflictError` if too many interactive requests wait."""
        if self._interactive.total() >= self._max_interactive:
            message = f"the planner is busy: {self._max_interactive} requests already wait"
        elif self._interactive[user] >= MAX_INTERACTIVE_PER_USER:
            message = f"{self._interactive[user]} requests of user '{user}' already wait for the planner"
        else:
            return
        raise ConflictError(message, hint="retry in a moment")

    def _add(self, request: MakePlans, answer: Future[PlanSet] | None) -> int:
        """Add a task and return its number, 0 after `close`."""
        if self._closed:
            return 0
        number = next(self._numbers)
        place = PRIORITY_RANK[request.submission.job.priority], 0.0, number
        self._tasks[number] = _Task(request=request, place=place, answer=answer)
        self._order.add(request.user, place)
        if len(self._threads) < min(self._num_workers, self._searches.total() + len(self._tasks)):
            self._threads.append(threading.Thread(target=self._serve, name="planner", daemon=True))
            self._threads[-1].start()
        self._changed.notify_all()
        return number

    def _drop(self, number: int) -> None:
        """Remove a task that still waits."""
        task = self._tasks.pop(number, None)
        if task is not None:
            self._order.discard(task.place)

    def _serve(self) -> None:
        """Run tasks, the next in order first, until `close`."""
        while (task := self._next_task()) is not None:
            try:
                if task.answer is None:
                    self._run_queued(task.request)
                else:
                    self._answer(task.request, task.answer)
            finally:
                self._end_search(task.request.user)

    def _next_task(self) -> _Task | None:
        """Wait for a task whose user may have another search; None after `close`."""
        with self._changed:
            while not self._closed:
                place = self._order.pop(self._may_search)
                if place is not None:
                    return self._begin_search(place[2])
                self._changed.wait()
            return None

    def _may_search(self, user: str) -> bool:
        return self._searches[user] < max(1, self._num_workers - 1)

    def _begin_search(self, number: int) -> _Task:
        task = self._tasks.pop(number)
        if self._number_by_job.get(task.request.job_id) == number:
            del self._number_by_job[task.request.job_id]
        self._searches[task.request.user] += 1
        return task

    def _end_search(self, user: str) -> None:
        with self._changed:
            self._searches -= Counter({user: 1})
            if not self._searches:
                self._order.forget_turns()
            self._changed.notify_all()

    def _answer(self, request: MakePlans, answer: Future[PlanSet]) -> None:
        try:
            answer.set_result(self._make_plans(request))
        except Exception as error:
            answer.set_exception(error)

    def _run_queued(self, request: MakePlans) -> None:
        failed = functools.partial(PlanningFailed, job_id=request.job_id, round=request.round)
        event: Event
        try:
            if not self._is_wanted(request):
                return
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
        asked = make_plan_request(request, self._pool_file)
        if asked is None:
            return PlanSet(plans=(), refused=(Refusal(clusters=(), reason="no cluster is connected"),))
        return self.planner(asked)


def make_plan_request(request: MakePlans, pool_file: Pool | None) -> PlanRequest | None:
    """Return the planner's request, on at most `MAX_PLANNED_CLUSTERS` clusters; None if there are none."""
    submission = request.submission
    clusters = planned_clusters(
        request.clusters,
        (*request.links, *(pool_file.links if pool_file else ())),
        request.free_chips,
        submission.job,
        submission.model,
        pool_file.chips if pool_file else (),
    )
    if not clusters:
        return None
    names = {one.name for one in clusters}
    return PlanRequest(
        job=submission.job,
        model=submission.model,
        pool=assemble_pool(clusters, pool_file, request.links),
        free_chips=_of_clusters(request.free_chips, names),
        free_storage_bytes=_of_clusters(request.free_storage_bytes, names),
        free_gbps={link: gbps for link, gbps in request.free_gbps.items() if set(link.split(">")) <= names},
        fetches=_of_clusters(request.fetches, names),
    )


def _of_clusters(found: Mapping[str, ValueT], names: Container[str]) -> dict[str, ValueT]:
    """Return the entries of some clusters."""
    return {name: value for name, value in found.items() if name in names}


def assemble_pool(clusters: tuple[Cluster, ...], pool_file: Pool | None, measured: tuple[Link, ...] = ()) -> Pool:
    """Return the pool of `clusters` with the operator's chip definitions and the links between them.

    `measured` are the links of pairs of clusters that the operator's file does not name.
    """
    names = {cluster.name for cluster in clusters}
    measured = tuple(one for one in measured if one.source in names and one.target in names)
    if pool_file is None:
        return Pool(clusters=clusters, links=measured)
    links = tuple(link for link in pool_file.links if link.source in names and link.target in names)
    named = {(link.source, link.target) for link in links}
    links += tuple(one for one in measured if not {(one.source, one.target), (one.target, one.source)} & named)
    return Pool(clusters=clusters, chips=pool_file.chips, links=links, currency=pool_file.currency)
