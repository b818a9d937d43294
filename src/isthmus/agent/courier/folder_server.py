"""`FolderServer`: the agent's end of the protocol for one run folder: `handle(frame)` returns the answer.

| frame | answer | effect |
|---|---|---|
| `hello`: version, instance, host | `welcome`: the far side's files, generation and size; paths | takes the folder |
| `look` | `listing`: the agent's files, what is left of the run lease, the lease of the hold | none |
| `fetch`: name, stamp, offset | `data`, or `changed` | none |
| `put`: name, generation, age | `stored`: generation, size | a whole new file, at once |
| `append`: name, generation, offset, age | `stored`: generation, size | the file grows if `offset` is its end |
| `remove`: name | `stored` | the file is gone |
| any of these three | `denied`: the file is not the far side's, or beyond a bound | none |
| `done` | `ended` | none: `exit` is on the agent's disk |

Frames may be repeated in any connection of the same instance: none has its effect twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from isthmus.agent.courier.courier_frames import MAX_BODY_BYTES, VERSION, Frame, FrameError
from isthmus.agent.courier.run_folder_files import FileDeniedError, RunFolderFiles


@dataclass(frozen=True, kw_only=True)
class Leases:
    """The leases at one time. `run_left_s` is None without a run lease; `hold` is the text of the hold's renewals."""

    run_left_s: float | None = None
    hold: str = ""
    released: bool = False


class FolderServer:
    """One connection of a worker to its run folder. `paths` are those in files that the worker replaces by its own."""

    def __init__(self, files: RunFolderFiles, leases: Callable[[], Leases], paths: Mapping[str, str]) -> None:
        self._files, self._leases, self._paths = files, leases, dict(paths)
        self._welcomed = False

    def handle(self, frame: Frame) -> Frame:
        """Return the answer to a frame; raise `FrameError` for one that ends the connection.

        Raises `FileNotFoundError` once the folder is gone.
        """
        if frame.kind == "hello":
            return self._hello(frame)
        if not self._welcomed:
            raise FrameError(f"'{frame.kind[:40]}' before 'hello'")
        try:
            return self._answer(frame)
        except FileDeniedError as error:
            return Frame("denied", {"reason": str(error)[:200]})

    def _answer(self, frame: Frame) -> Frame:
        match frame.kind:
            case "look":
                return self._listing()
            case "fetch":
                return self._fetch(frame)
            case "put":
                size = self._files.put(
                    frame.file_name(), frame.number("generation"), frame.body, frame.seconds("age_s")
                )
                return Frame("stored", {"generation": frame.number("generation"), "size": size})
            case "append":
                where = frame.file_name(), frame.number("generation"), frame.number("offset")
                generation, size = self._files.append(*where, frame.body, frame.seconds("age_s"))
                return Frame("stored", {"generation": generation, "size": size})
            case "remove":
                self._files.remove(frame.file_name())
                return Frame("stored", {"generation": 0, "size": 0})
            case "done":
                if "exit" not in self._files.far_files():
                    raise FrameError("'done' before 'exit'")
                return Frame("ended")
        raise FrameError(f"unknown kind '{frame.kind[:40]}'")

    def _hello(self, frame: Frame) -> Frame:
        if frame.number("version") != VERSION:
            return Frame("refused", {"reason": f"this agent's courier has version {VERSION}"})
        instance, host = frame.text("instance"), frame.text("host")
        if not (len(instance) == 64 and instance.isalnum()) or not host.isprintable() or len(host) > 255:
            raise FrameError("hello: no instance or host")
        if not self._files.take(instance, host.replace(" ", "_") or "-"):
            return Frame("refused", {"reason": "the folder was started or stopped before"})
        self._welcomed = True
        have = {name: list(found) for name, found in self._files.far_files().items()}
        return Frame("welcome", {"have": have, "paths": self._paths})

    def _listing(self) -> Frame:
        leases = self._leases()
        files = {name: [one.stamp, one.num_bytes, one.mode] for name, one in self._files.agent_files().items()}
        fields: dict[str, Any] = {
            "files": files, "run_left_s": leases.run_left_s, "hold": leases.hold, "released": leases.released
        }  # fmt: skip
        return Frame("listing", fields)

    def _fetch(self, frame: Frame) -> Frame:
        data = self._files.read(frame.file_name(), frame.text("stamp"), frame.number("offset"), MAX_BODY_BYTES)
        return Frame("changed") if data is None else Frame("data", body=data)
