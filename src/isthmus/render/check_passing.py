"""`check_passing`: checks that a site can pass every setting of a part as it asks; none is dropped silently."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Literal

from isthmus.core.errors import InputError
from isthmus.render.communication_settings import BACKEND_FIELD, SITE_LIBRARIES
from isthmus.render.image import SPEC_FILE, Image
from isthmus.render.setting import Setting

StartKind = Literal["container", "pod", "process"]
"""How a site starts workers: in containers of its agent, in pods of its scheduler, as processes of its nodes."""

CPU_LIMIT, MEMORY_LIMIT = "cpu.cores", "memory.bytes"
"""Names of the limits of a container."""

SPEC_FIELDS = (
    BACKEND_FIELD, "lanes", "congestion_control", "threads", "rendezvous_timeout_s", "heartbeat_s", "peer_timeout_s",
    "checkpoint_timeout_s",
)  # fmt: skip
"""Fields of `spec.json` that rendering may set; all others are the job's or the agent's."""

_LIMITS = (CPU_LIMIT, MEMORY_LIMIT)


def check_passing(settings: Iterable[Setting], image: Image, starts: StartKind) -> None:
    """Raise `InputError` for a setting that a site with this way of starting workers cannot pass to `image`."""
    for one in settings:
        if one.passed_as == "argument" and image.facts.code == "system":
            text, hint = "Isthmus' own program takes no arguments", "pass it as environment or file"
            raise InputError(f"{one.origin}: argument '{one.name}': {text}", hint=hint)
        if one.passed_as == "file" and image.facts.code == "system" and one.origin != "job":
            _check_name(one, one.name.removeprefix(f"{SPEC_FILE}#"), SPEC_FIELDS)
        if one.passed_as == "container" and (one.origin.startswith("template") or one.origin == SITE_LIBRARIES):
            _check_container(one, starts)


def _check_container(one: Setting, starts: StartKind) -> None:
    if starts == "process":
        text = f"{one.origin}: '{one.name}' is of a container, and this site runs workers as processes"
        raise InputError(text, hint="leave it out, or run workers from images (workers.containers)")
    if starts == "pod" and one.name.startswith("/"):
        text = f"{one.origin}: a pod cannot mount '{one.name}' from the agent's machine"
        raise InputError(text, hint="put it into the image")
    if not one.name.startswith("/"):
        _check_name(one, one.name, _LIMITS)
        try:
            number = float(one.value) if one.name == CPU_LIMIT else int(one.value)
        except ValueError:
            number = 0
        if number <= 0:
            raise InputError(f"{one.origin}: {one.name} is '{one.value}'", hint="give a positive number")


def _check_name(one: Setting, name: str, known: Sequence[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"
        raise InputError(f"{one.origin}: unknown {one.passed_as} setting '{name}'", hint=hint)
