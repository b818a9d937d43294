"""`HolderJob`: the one Ray job of an agent, which holds its placement groups; submitted once per number.

Its submission id is the agent's own key and a number, and Ray refuses a second job of one id: a lost reply is repeated
without harm. The next number is taken only once Ray says that the job has ended, or in two looks at one session knows
no such job.
"""

from __future__ import annotations

import contextlib
import io
import json
import uuid
import zipfile
from pathlib import Path
from typing import Any

from isthmus.agent.adapters.ray.ray_rest import ENDED_STATES, RayRest
from isthmus.agent.courier.courier import Courier
from isthmus.agent.courier.courier_archive import courier_archive
from isthmus.agent.courier.start_file import write_start
from isthmus.core.errors import UnavailableError
from isthmus.core.messages.worker_folder import open_regular, write_atomically

HOLDER_LEASE_S = 60.0
FIRST_CONTACT_S = 15.0
"""How long a holder or rank that cannot reach the agent goes on trying: it holds cards meanwhile."""
_HOLDER = Path(__file__).with_name("holder.py")  # it runs at Ray and imports it, as no part of the agent does
_MAX_STATE_BYTES = 1 << 20
_STATES = ("waiting", "granted", "ended")


class HolderJob:
    """The holder job of the agent with the folder `state`; `python` is what Ray's nodes call Python."""

    def __init__(self, state: Path, rest: RayRest, courier: Courier, python: str = "python") -> None:
        self._state, self._rest, self._courier, self._python = state, rest, courier, python
        self._missing = ""

    @property
    def number(self) -> int:
        """The number of the present holder job, from 1."""
        return int(self._known()["number"])

    @property
    def submission_id(self) -> str:
        """The id of the present holder job at Ray."""
        known = self._known()
        return f"isthmus-{known['key']}-{known['number']}"

    @property
    def folder(self) -> Path:
        """The run folder of the present holder job."""
        return self._place / "folder"

    @property
    def _place(self) -> Path:
        return self._state / "holders" / str(self.number)

    def renew(self) -> None:
        """Renew the lease of the holder job: without holds it ends once it sees no renewal."""
        file, number = self._place / "hold" / "lease", 0
        with contextlib.suppress(OSError, ValueError, IndexError):
            number = int(file.read_text(encoding="ascii").split()[0])
        write_atomically(file, f"{number + 1} {HOLDER_LEASE_S}\n")

    def has_ended(self, session: str) -> bool:
        """Look once; return whether the present job is over, and go on to the next number if it is."""
        known = self._known()
        if not known["accepted"]:
            return False
        state = self._rest.job_state(self.submission_id)
        if state is None and self._missing != session:
            self._missing = session
            return False
        if state is not None and state not in ENDED_STATES:
            self._missing = ""
            return False
        self._courier.revoke(self.folder)
        if state is not None:
            with contextlib.suppress(UnavailableError):  # then it stays in Ray's list
                self._rest.delete(self.submission_id)
        self._missing = ""
        self._save({**known, "number": known["number"] + 1, "accepted": False})
        return True

    def ensure(self) -> None:
        """Submit the present job unless Ray has accepted it; a lost reply is repeated."""
        known = self._known()
        if known["accepted"]:
            return
        self._write_folder()
        package = self._rest.upload(f"_ray_pkg_{known['key']}_{known['number']}.zip", self._package())
        entrypoint = f"{self._python} courier.pyz --ticket holder.ticket --first-contact-s {FIRST_CONTACT_S:g}"
        self._rest.submit(self.submission_id, entrypoint, package)
        self._save({**known, "accepted": True})

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
        return state, tuple(nodes)

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

    def _known(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self._state / "holder.json").read_bytes())
        except FileNotFoundError:
            found = {"key": uuid.uuid4().hex, "number": 1, "accepted": False}
            self._save(found)
        return found

    def _save(self, known: dict[str, Any]) -> None:
        write_atomically(self._state / "holder.json", json.dumps(known))
