"""`CarrierProcess`: the process of a transport, from its start to its end, as the worker sees it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from contextlib import suppress

from isthmus.comm.process.arena import Arena
from isthmus.comm.process.control_messages import Line, Word
from isthmus.core.errors import UnavailableError

END_S = 15.0
"""How long it may take to end once it was told to; then it is killed."""


class CarrierProcess:
    """The transport process, given `listener`; `line` and `arena` are what we share with it.

    All it is told goes over the line: nothing is on its command line but numbers of open files. It sees the
    line end when we do, and ends.
    """

    def __init__(self, listener: socket.socket) -> None:
        self.arena = Arena()
        ours, theirs = socket.socketpair()
        self.line = Line(ours)
        files = (theirs.fileno(), self.arena.descriptor, listener.fileno())
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "isthmus.comm.process.transport_process", *map(str, files)],
                stdin=subprocess.DEVNULL,
                pass_fds=files,
            )
        except OSError as error:
            self.close()
            raise UnavailableError(
                f"cannot start the process of the transport: {error.strerror or error}",
                hint="give the worker room for one more process, or use transport: thread",
            ) from error
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def say(self, word: Word) -> None:
        """Tell it something; where it is gone, the end of the line says so."""
        with suppress(OSError):
            self.line.say(word)

    def kill(self) -> None:
        """End it at once: its connections break as those of a worker that was killed."""
        self._process.kill()

    def wait(self) -> None:
        """Return when it has ended; make it end where that takes too long."""
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Let go of what was shared with it, once it has ended and nobody listens to it."""
        self.line.close()
        self.arena.close()

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it, not a defect of its own; once it has ended."""
        return (self._process.returncode or 0) < 0

    def how_it_ended(self) -> str:
        """Return how it ended, in words; once it has."""
        status = self._process.returncode
        return (
            f"was ended by {signal.Signals(-status).name}"
            if self.was_killed
            else f"ended with status {status}"
        )
