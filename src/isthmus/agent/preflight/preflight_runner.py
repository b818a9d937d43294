"""`PreflightRunner`: executes the server's preflight orders in the background, with a limit on time and threads."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from isthmus.agent.files.site_storage import SiteStorage
from isthmus.agent.preflight.preflight_checks import CheckContext, failed, run_check, unfinished
from isthmus.core.errors import InputError
from isthmus.core.messages.preflight import CheckResult, PreflightAnswer, PreflightOrder

REMOVE_LIMIT_S = 30.0
REMOVE_POLL_S = 0.2
"""How long, and how often, the folder of a dry run is tried to be removed."""

LIMIT_S = 10.0
"""Time that the checks of one order may take; those that have not finished are reported as unknown."""

MAX_THREADS = 16
"""Orders in execution, including those that a file system blocks; further ones wait for their turn."""

RunKey = tuple[str, int]
"""Job and round of a preflight."""


@dataclass(kw_only=True)
class _Run:
    """The execution of one order."""

    order: PreflightOrder
    context: CheckContext
    started_s: float
    results: list[CheckResult] = field(default_factory=list)
    thread: threading.Thread | None = None
    answer: PreflightAnswer | None = None


class PreflightRunner:
    """Runs checks at `site`, on its `storage`. `clock` is monotonic, in seconds.

    `threads` are those in which checks run; `act_as` gives a thread the rights of a user's workers to files.
    """

    def __init__(
        self,
        site: str,
        storage: SiteStorage,
        clock: Callable[[], float],
        act_as: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._act_as = act_as
        self._site, self.storage, self._clock = site, storage, clock
        self._runs: dict[RunKey, _Run] = {}
        self.threads: list[threading.Thread] = []

    @property
    def is_open(self) -> bool:
        """Whether the server still lists an order."""
        return bool(self._runs)

    def update(self, orders: Iterable[PreflightOrder]) -> None:
        """Start new orders; remove what the checks of finished preflights have left."""
        listed = {(order.job, order.round): order for order in orders}
        for key in [key for key in self._runs if key not in listed]:
            self._remove(self._runs.pop(key))
        for key, order in listed.items():
            known = self._runs.get(key)
            if known is not None and known.order.phase == order.phase:
                continue
            self.threads = [thread for thread in self.threads if thread.is_alive()]
            if len(self.threads) < MAX_THREADS:
                self._runs[key] = self._start(order, known)

    def answers(self) -> tuple[PreflightAnswer, ...]:
        """Return the answer of every listed order that has finished or has used up its time."""
        for run in self._runs.values():
            if run.answer is None:
                run.answer = self._answer(run)
        return tuple(run.answer for run in self._runs.values() if run.answer is not None)

    def close(self) -> None:
        """Remove what the checks of all preflights have left."""
        self.update(())

    def _start(self, order: PreflightOrder, earlier: _Run | None) -> _Run:
        """Start an order; the second phase continues with the files of the first one."""
        context = earlier.context if earlier else self._new_context(order.user)
        run = _Run(order=order, context=context, started_s=self._clock())

        def work() -> None:
            try:
                self._act_as(order.user)
            except InputError as error:
                run.results.extend(failed(check, error) for check in order.checks)
                return
            for check in order.checks:
                run.results.append(run_check(check, context))

        run.thread = threading.Thread(target=work, name=f"preflight of {order.job}", daemon=True)
        self.threads.append(run.thread)
        run.thread.start()
        return run

    def _new_context(self, user: str) -> CheckContext:
        return CheckContext(site=self._site, user=user, storage=self.storage)

    def _answer(self, run: _Run) -> PreflightAnswer | None:
        """Return the answer of an order, None while its checks still have time."""
        seconds, is_alive = self._clock() - run.started_s, run.thread is not None and run.thread.is_alive()
        if is_alive and seconds < LIMIT_S:
            return None
        results = list(run.results)
        results += [unfinished(check, run.context, LIMIT_S) for check in run.order.checks[len(results) :]]
        return PreflightAnswer(
            job=run.order.job,
            round=run.order.round,
            phase=run.order.phase,
            results=tuple(results),
            facts=dict(run.context.facts),
            seconds=seconds,
        )

    def _remove(self, run: _Run) -> None:
        """Remove the files of a preflight, and the folders of a dry run, in the background: a disk may not answer.

        A check that is late has made its files before. The file of another site may be in a folder for some time.
        """

        def work() -> None:
            if run.thread is not None:
                run.thread.join(LIMIT_S)
            with contextlib.suppress(InputError):
                self._act_as(run.order.user)
            for file in list(run.context.made_files):
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)
            limit_s = run.context.monotonic() + REMOVE_LIMIT_S
            for folder in reversed(run.context.made_folders if run.order.temporary else ()):
                while not _is_removed(folder) and run.context.monotonic() < limit_s:
                    run.context.sleep(REMOVE_POLL_S)

        self.threads.append(threading.Thread(target=work, name="preflight's end", daemon=True))
        self.threads[-1].start()


def _is_removed(folder: Path) -> bool:
    """Remove a folder; return False while it has content."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        return error.errno not in (errno.ENOTEMPTY, errno.EEXIST)
    return True
