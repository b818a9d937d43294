"""Keeps a pod for its hold and runs there what the agent orders: `pod_keeper.py FOLDER`, started by the courier.

For each worker the agent puts an order, a ticket of the courier, into the run folder; the keeper starts the courier
with it, once. It ends when the hold has ended (`ISTHMUS_HOLD`), after the workers, which watch the hold as well, have
handed over their last files. SIGTERM, which a pod gets when it is deleted or preempted, goes to the workers.

    order-ID     a ticket; the ID is the agent's
    ended-ID     written here: the status of the courier that had the ticket
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from isthmus.core.process.rank_runner import Lease

POLL_S = 0.05
HAND_OVER_S = 60.0
"""How long workers whose hold has ended may take to end and to hand over their files."""

ORDER, ENDED = "order-", "ended-"


class PodKeeper:
    """The keeper of one pod; `command` starts the courier, the ticket and the work folder are appended."""

    def __init__(self, folder: Path, command: tuple[str, ...]) -> None:
        self._folder, self._command = folder, command
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._known: set[str] = set()

    @property
    def is_idle(self) -> bool:
        """Whether no worker runs."""
        return not self._running

    def start_ordered(self) -> None:
        """Start what was ordered and not started yet."""
        for order in sorted(self._folder.glob(f"{ORDER}*")):
            name = order.name.removeprefix(ORDER)
            if name in self._known:
                continue
            self._known.add(name)
            work = self._folder.parent / f"work-{name}"
            self._running[name] = subprocess.Popen(  # noqa: S603 - the courier
                [*self._command, "--ticket", str(order), "--work", str(work)],
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def reap(self) -> None:
        """Note which couriers have ended."""
        for name, process in list(self._running.items()):
            status = process.poll()
            if status is not None:
                (self._folder / f"{ENDED}{name}").write_text(f"{status}\n", encoding="ascii")
                del self._running[name]

    def signal(self, number: int) -> None:
        """Pass a signal on to the workers."""
        for process in self._running.values():
            if process.poll() is None:
                process.send_signal(number)


def keep(keeper: PodKeeper, has_ended: Callable[[], bool], pause: Callable[[float], object]) -> None:
    """Run what is ordered until the hold has ended and with it every worker, or their time is over."""
    while not has_ended():
        keeper.start_ordered()
        keeper.reap()
        pause(POLL_S)
    for _ in range(round(HAND_OVER_S / POLL_S)):  # the time-out
        keeper.reap()
        if keeper.is_idle:
            return
        pause(POLL_S)


def main() -> None:
    """Keep the pod whose run folder is the last argument."""
    keeper = PodKeeper(Path(sys.argv[-1]), (sys.executable, "-m", "isthmus.agent.courier.run_part"))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: keeper.signal(received))
    keep(keeper, Lease(os.environ["ISTHMUS_HOLD"]).has_ended, time.sleep)


if __name__ == "__main__":
    main()
