"""The file with what is set on a device: `read_edge_state`, `write_edge_state`."""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from isthmus.core.errors import InputError, UnavailableError
from isthmus.wan.edge.edge_settings import EdgeSettings

MAX_STATE_BYTES = 64 * 2**20
_ADAPTER = TypeAdapter(dict[str, EdgeSettings])


def read_edge_state(file: Path, device: str) -> EdgeSettings | None:
    """Return what `file` says is set on `device`; None without the file.

    Raises `InputError` for a file that this program has not written, or that is of another device.
    """
    try:
        if not file.exists():
            return None
        if file.stat().st_size > MAX_STATE_BYTES:
            raise InputError(f"{file} has more than {MAX_STATE_BYTES:,} bytes", hint="name the file of `--state`")
        found = _ADAPTER.validate_json(file.read_bytes())
    except OSError as error:
        raise UnavailableError(f"cannot read {file}: {error.strerror}") from error
    except ValidationError as error:
        raise InputError(
            f"{file} does not state the settings of an edge", hint="remove it, and all is set again"
        ) from error
    if set(found) != {device}:
        raise InputError(f"{file} is of {', '.join(found) or 'no device'}, not {device}", hint="one file for a device")
    return found[device]


def write_edge_state(file: Path, device: str, settings: EdgeSettings) -> None:
    """Write what is set on `device`, atomically."""
    temporary = file.with_name(file.name + ".new")
    try:
        temporary.write_bytes(_ADAPTER.dump_json({device: settings}))
        temporary.replace(file)
    except OSError as error:
        raise UnavailableError(f"cannot write {file}: {error.strerror}", hint="the settings are in force") from error
