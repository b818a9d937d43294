"""`HolderJob`: the one Ray job of an agent, which holds its placement groups; submitted once per number.

Its submission id is the agent's own key and a number, and Ray refuses a second job of one id: a lost reply is repeated
without harm. The next number is taken only once Ray says that the job has ended, or in two looks at one session knows
no such job. A job that ended without being asked to is followed by the next after a pause, and its reason is kept.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isthmus.agent.adapters.ray.forget_job import forget_job
from isthmus.agent.adapters.ray.holder_record import HolderRecord, read_record, write_record
from isthmus.agent.adapters.ray.job_trouble import job_trouble, last_line, trouble_hint
from isthmus.agent.adapters.ray.ray_rest import RayJob, RayRest
from isthmus.agent.courier.courier import Courier
from isthmus.agent.courier.courier_archive import courier_archive
from isthmus.agent.courier.start_file import write_start
from isthmus.core.errors import UnavailableError
from isthmus.core.messages.worker_folder import WorkerFolder, open_regular, write_atomically
from isthmus.core.process.boot_clock import boot_id, boot_time_s

HOLDER_LEASE_S = 60.0
END_S, POLL_S = 40.0, 0.5
FIRST_CONTACT_S = 15.0
"""How long a holder or rank that cannot reach the agent goes on trying: it holds cards meanwhile."""
_HOLDER = Path(__file__).with_name("holder.py")  # it runs at Ray and imports it, as no part of the agent does
_MAX_STATE_BYTES = 1 << 20
_LOG_END_BYTES = 4096
_STATES = ("waiting", "granted", "ended")


def holder_entrypoint(python: str) -> str:
    """Return what Ray's head runs as the holder job, in the folder of its package."""
    return f"{python} courier.pyz --ticket holder.ticket --first-contact-s {FIRST_CONTACT_S:g}"


class HolderJob:
    """The holder job of the agent with the folder `state`; `python` is what Ray's nodes call Python."""

    def __init__(
        self, state: Path, rest: RayRest, courier: Courier, python: str = "python",
        clock: Callable[[], float] = boot_time_s, pause: Callable[[float], object] = time.sleep,
    ) -> None:  # fmt: skip
        self._rest, self._courier, self._python, self._clock, self._pause = rest, courier, python, clock, pause
        self._state, self._file, self._missing = state, state / "holder.json", ""

    @property
    def number(self) -> int:
        """The number of the present holder job, from 1."""
        return self._known().number

    @property
    def submission_id(self) -> str:
        """The id of the present holder job at Ray."""
        known = self._known()
        return f"isthmus-{known.key}-{known.number}"

    @property
    def trouble(self) -> str:
        """Why no holder answers, with what to do; "" unless one has ended without being asked to."""
        known = self._known()
        if known.answered or not known.trouble:
            return ""
        hint = trouble_hint(known.trouble)
        times = f"{known.num_failures} times in a row; " if known.num_failures > 1 else ""
        return f"the agent's job at Ray ended: {times}{known.trouble}{f' ({hint})' if hint else ''}"

    @property
    def folder(self) -> Path:
        """The run folder of the present holder job."""
        return self._place / "folder"

    @property
    def _place(self) -> Path:
        return self._state / "holders" / str(self.number)

    @property
    def is_missing(self) -> bool:
        """Whether Ray knew no such job in the last look: in the next it counts as over."""
        return bool(self._missing)

    def renew(self) -> None:
        """Renew the lease of the holder job: without holds it ends once it sees no renewal."""
        file, number = self._place / "hold" / "lease", 0
        with contextlib.suppress(OSError, ValueError, IndexError):
            number = int(file.read_text(encoding="ascii").split()[0])
        write_atomically(file, f"{number + 1} {HOLDER_LEASE_S}\n")

    def has_ended(self, session: str) -> bool:
        """Look once; return whether the present job is over, and go on to the next number if it is."""
        known = self._known()
        if not known.accepted:
            return False
        job = self._rest.job(self.submission_id)
        if job is None and self._missing != session:
            self._missing = session
            return False
        if job is not None and not job.has_ended:
            self._missing = ""
            return False
        trouble = self._trouble_of(job)
        self._courier.revoke(self.folder)
        if job is not None:
            with contextlib.suppress(UnavailableError):  # then it stays in Ray's list
                self._rest.delete(self.submission_id)
        self._missing = ""
        write_record(self._file, known.after(trouble, boot_id(), self._clock()))
        return True

    def ensure(self) -> None:
        """Submit the present job unless Ray has accepted it; a lost reply is repeated, and a failure after a pause."""
        known = self._known()
        if known.accepted or not known.may_submit(boot_id(), self._clock()):
            return
        self._write_folder()
        package = self._rest.upload(f"_ray_pkg_{known.key}_{known.number}.zip", self._package())
        self._rest.submit(self.submission_id, holder_entrypoint(self._python), package)
        write_record(self._file, known.model_copy(update={"accepted": True}))

    def end(self) -> None:
        """End the present job, by its courier, else by Ray, which then forgets it; `UnavailableError` if it is late."""
        if not self._known().accepted:
            return
        write_atomically(self._place / "hold" / "released", "")
        stop_s, end_s = self._clock() + END_S / 2, self._clock() + END_S
        while (job := self._rest.job(self.submission_id)) is not None and not job.has_ended:
            if self._clock() >= end_s:
                raise UnavailableError(f"the job {self.submission_id} still runs at Ray", hint="ray job stop, delete")
            if self._clock() >= stop_s:
                self._rest.stop(self.submission_id)
            self._pause(POLL_S)
        forget_job(self._rest, self.submission_id, self._pause)

    def write_order(self, name: str, order: dict[str, Any], mode: int = 0o600) -> None:
        """Leave an order for the holder; the same one again changes nothing."""
        file, text = self.folder / name, json.dumps(order)
        with contextlib.suppress(OSError):
            if file.read_text(encoding="utf-8") == text:
                return
        write_atomically(file, text, mode=mode)

    def forget(self, hold_id: str) -> None:
        """Remove the orders of a hold that has ended."""
        for file in self.folder.glob("rank-*.json"):
            with contextlib.suppress(OSError, ValueError):
                if json.loads(file.read_bytes())["hold"] == hold_id:
                    file.unlink()
        (self.folder / f"hold-{hold_id}.json").unlink(missing_ok=True)

    def read_state(self, hold_id: str, num_ranks: int) -> tuple[str, tuple[str, ...]]:
        """Return the state of a hold and the node of each rank; `waiting` before the holder has answered.

        Raises `UnavailableError` for an answer that is malformed.
        """
        try:
            with open_regular(self.folder / f"state-{hold_id}.json") as stream:
                found = json.loads(stream.read(_MAX_STATE_BYTES))
        except FileNotFoundError:
            return "waiting", ()
        except ValueError:
            found = None
        state = found.get("state") if isinstance(found, dict) else None
        nodes = found.get("nodes", []) if isinstance(found, dict) else None
        if state not in _STATES or not isinstance(nodes, list) or not all(isinstance(node, str) for node in nodes):
            raise UnavailableError(f"the holder's answer for hold {hold_id} cannot be read")
        if state == "granted" and len(nodes) != num_ranks:
            raise UnavailableError(f"the holder names {len(nodes)} nodes for {num_ranks} ranks of hold {hold_id}")
        known = self._known()
        if not known.answered:
            write_record(self._file, known.model_copy(update={"answered": True}))
        return state, tuple(nodes)

    def _trouble_of(self, job: RayJob | None) -> str:
        """Return why the present job, which is over, ended without being asked to; "" if it had nothing to do."""
        status = WorkerFolder(self.folder).read_exit()
        if status == 0:
            return ""
        if status is None:
            return job_trouble(job)
        end = b""
        with contextlib.suppress(OSError), open_regular(self.folder / "log") as log:
            log.seek(0, io.SEEK_END)
            log.seek(max(0, log.tell() - _LOG_END_BYTES))
            end = log.read(_LOG_END_BYTES)
        return f"status {status}: {last_line(end.decode(errors='replace')) or 'an empty log'}"

    def _write_folder(self) -> None:
        folder = self.folder
        if (folder / "start.json").exists():
            return
        write_atomically(folder / "holder.py", _HOLDER.read_bytes())
        write_atomically(folder / "courier.pyz", courier_archive())
        self.renew()
        program = ("{python}", str(folder / "holder.py"), str(folder), str(folder / "courier.pyz"))
        write_start(folder, program, {}, ends_with_hold=False)

    def _package(self) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as package:
            package.writestr("courier.pyz", courier_archive())
            package.writestr("holder.ticket", self._courier.ticket(self.folder, self._place / "hold"))
        return out.getvalue()

    def _known(self) -> HolderRecord:
        return read_record(self._file)
