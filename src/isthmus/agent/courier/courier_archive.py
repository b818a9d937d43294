"""`courier_archive`: the worker's end as one file that Python runs, for nodes where Isthmus is not installed."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import isthmus

_MODULES = (
    "agent/courier/courier_frames.py", "agent/courier/folder_client.py",
    "agent/courier/run_part.py", "agent/courier/courier_link.py", "agent/courier/work_folder.py",
    "agent/courier/part_program.py",
    "core/process/boot_clock.py", "core/process/confined_start.py", "core/process/container_start.py",
    "core/process/node_container.py", "core/process/rank_runner.py",
)  # fmt: skip
"""They need the standard library and each other alone."""

_MAIN = "import sys\nfrom isthmus.agent.courier.run_part import main\nsys.exit(main())\n"
_TIME = (2000, 1, 1, 0, 0, 0)


def courier_archive() -> bytes:
    """Return the archive: `python courier.pyz --ticket FILE` is `run_part`. The same source gives the same bytes."""
    source = Path(isthmus.__file__).parent
    contents = {f"isthmus/{name}": (source / name).read_bytes() for name in _MODULES}
    folders = {str(parent) for name in contents for parent in Path(name).parents if parent != Path()}
    contents |= {f"{folder}/__init__.py": b"" for folder in folders} | {"__main__.py": _MAIN.encode()}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(contents):
            archive.writestr(zipfile.ZipInfo(name, _TIME), contents[name], zipfile.ZIP_DEFLATED)
    return out.getvalue()
