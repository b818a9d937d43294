"""`RunAgreement`: what the ranks of a run agree on over their tree: that all have met, and that all live at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum

from isthmus.comm.meeting.rank_tree import TreePlace
from isthmus.comm.meeting.tree_wave import Signal, Signals, TreeWave


class Notice(IntEnum):
    """What a notice of a neighbour says: its tag on the wire."""

    LOST = 0
    """A loss has broken the run; the text is a `loss_report`."""
    MET_READY = 1
    MET_DONE = 2
    END_CALL = 3
    END_READY = 4
    END_DONE = 5


_MET = {Signal.READY: Notice.MET_READY, Signal.DONE: Notice.MET_DONE}
_END = {Signal.CALL: Notice.END_CALL, Signal.READY: Notice.END_READY, Signal.DONE: Notice.END_DONE}
_MET_SIGNALS = {notice: signal for signal, notice in _MET.items()}
_END_SIGNALS = {notice: signal for signal, notice in _END.items()}


class RunAgreement:
    """The agreements of the rank at `place`; `notify(neighbour, notice)` sends a notice. Thread-safe.

    Without a place the rank has a connection to every other one, and has met them all.
    """

    def __init__(self, place: TreePlace | None, notify: Callable[[int, Notice], None]) -> None:
        self._notify, self._lock = notify, threading.Lock()
        here = TreePlace(None, ()) if place is None else place
        self._met, self._end = TreeWave(here, calls=False), TreeWave(here, calls=True)
        if place is None:
            self.meet()

    @property
    def has_met(self) -> bool:
        """Whether all ranks are connected to their neighbours."""
        return self._met.is_done

    @property
    def has_ended(self) -> bool:
        """Whether all ranks have answered that they live, since one of them is at its end."""
        return self._end.is_done

    @property
    def not_met(self) -> tuple[int, ...]:
        """The neighbours that have not said yet that all ranks behind them have met."""
        with self._lock:
            return self._met.missing

    @property
    def not_ended(self) -> tuple[int, ...]:
        """The neighbours that have not answered yet for all ranks behind them."""
        with self._lock:
            return self._end.missing

    def meet(self) -> None:
        """Say that this rank is connected to its neighbours."""
        with self._lock:
            self._pass_on(self._met.begin(), _MET)

    def end(self) -> None:
        """Ask every rank whether it lives."""
        with self._lock:
            self._pass_on(self._end.begin(), _END)

    def receive(self, neighbour: int, notice: Notice) -> None:
        """Handle a notice other than `LOST`."""
        with self._lock:
            if notice in _MET_SIGNALS:
                self._pass_on(self._met.receive(neighbour, _MET_SIGNALS[notice]), _MET)
            elif notice in _END_SIGNALS:
                self._pass_on(self._end.receive(neighbour, _END_SIGNALS[notice]), _END)

    def _pass_on(self, signals: Signals, notices: dict[Signal, Notice]) -> None:
        for neighbour, signal in signals:
            self._notify(neighbour, notices[signal])
