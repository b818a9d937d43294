"""`communication_settings`: the library that a part communicates with, and its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources

import yaml
from pydantic import TypeAdapter

from isthmus.core.errors import InputError
from isthmus.core.units import MIB
from isthmus.render.blueprint import Blueprint
from isthmus.render.image import Image, LibrarySupport, Passing
from isthmus.render.setting import Setting, SettingClass

MIN_BUFFER_BYTES = 4 * MIB
"""Smallest buffer that a reserved wide-area path gets, which is NCCL's default."""

MAX_BUFFER_BYTES = 1024 * MIB
MIN_MESSAGE_BYTES = MIB
_MESSAGES_PER_BUFFER = 8
"""Messages of a buffer: the next ones are filled while the first is on its way."""

CONNECTION_BYTES, MAX_CONNECTIONS = 4 * MIB, 64
"""Bytes that Linux lets one TCP connection have in flight by default (the last number of tcp_wmem)."""

SITE_LIBRARIES = "site libraries"

BACKEND_FIELD = "backend"
"""Field of `spec.json` that selects the communication library of Isthmus' own program."""


def communication_settings(image: Image, blueprint: Blueprint, library_files: Mapping[str, str]) -> Iterator[Setting]:
    """Yield what selects the communication library of a part and sets its parameters.

    `library_files` are the site's own libraries, a `.so` by name, which may replace the image's. Source:
    `cross-domain-pooling.txt` 4.1.2 (3), communication library and its parameters. Raises `InputError` if the image
    can neither select nor replace what the job names.
    """
    name, origin = _choose(image, blueprint)
    known = support_of(image, name)
    if name not in image.facts.libraries:
        yield _replacement(image, name, library_files)
    elif known.select is not None:
        yield _pass(image, known.select, known.value or name, "library", origin)
    elif image.facts.code == "system":
        yield from _select_backend(image, known, name, origin, blueprint)
    yield from _parameters(image, known, blueprint)


def chosen_library(image: Image, blueprint: Blueprint) -> str:
    """Return the name of the communication library of a part."""
    return _choose(image, blueprint)[0]


def support_of(image: Image, library: str) -> LibrarySupport:
    """Return how `image` supports `library`; what it leaves open is taken from what is known of the library."""
    stated = image.facts.libraries.get(library, LibrarySupport())
    known = _known_libraries().get(library, LibrarySupport())
    return known.model_copy(update={name: getattr(stated, name) for name in stated.model_fields_set})


def _choose(image: Image, blueprint: Blueprint) -> tuple[str, str]:
    """Return the library and who chose it: the job, else the network that the part uses."""
    if blueprint.runtime.library is not None:
        return blueprint.runtime.library, "job"
    libraries = image.facts.libraries
    if blueprint.path.kind != "local":
        across = [name for name in libraries if support_of(image, name).across_sites]
        if not across:
            raise InputError(
                f"image {image.reference} has no communication library for links between clusters "
                f"(it has {', '.join(libraries) or 'none'})",
                hint="name one in runtime.library, or an image with `across_sites: true` for one",
            )
        return across[0], f"network: {blueprint.path.kind}"
    if blueprint.collective_library in libraries or not libraries:
        return blueprint.collective_library, f"chip {blueprint.chip}"
    return next(iter(libraries)), f"image {image.reference}"


def _select_backend(
    image: Image, support: LibrarySupport, name: str, origin: str, blueprint: Blueprint
) -> Iterator[Setting]:
    """Yield what selects the library of Isthmus' own program: its own one unless the job names another.

    Raises `InputError` for a library that cannot connect the part with other clusters.
    """
    if origin != "job":
        return
    if blueprint.path.kind != "local" and not support.across_sites:
        raise InputError(
            f"runtime.library: '{name}' connects ranks of one cluster, and the part has ranks at others",
            hint="leave it out, or name `isthmus`",
        )
    yield _pass(image, Passing(passed_as="file", name=BACKEND_FIELD), name, "library", origin)


def _replacement(image: Image, name: str, library_files: Mapping[str, str]) -> Setting:
    """Return the mount of the site's library file over the image's."""
    if image.facts.library_file is None or name not in library_files:
        has = ", ".join(image.facts.libraries) or "none"
        lacks = "no library_file to replace" if image.facts.library_file is None else f"no file of {name} at the site"
        raise InputError(
            f"runtime.library: image {image.reference} does not support '{name}' (it has {has}), and there is {lacks}",
            hint=f"the site's own: {', '.join(library_files) or 'none'}",
        )
    return Setting(
        name=image.facts.library_file,
        setting_class="library",
        value=f"{library_files[name]}:ro",
        passed_as="container",
        origin=SITE_LIBRARIES,
    )


def _parameters(image: Image, support: LibrarySupport, blueprint: Blueprint) -> Iterator[Setting]:
    """Yield the job's parameters, else those that the network asks for; inside one cluster the defaults hold."""
    if blueprint.runtime.communication:
        for name, value in blueprint.runtime.communication.items():
            yield _pass(image, Passing(passed_as="environment", name=name), value, "communication", "job")
        return
    path = blueprint.path
    if path.kind == "reserved":
        buffer_bytes, message_bytes = reserved_sizes(path.in_flight_bytes)
        origin = f"round trip {path.round_trip_s * 1e3:g} ms at {path.bandwidth_gbps:g} Gbit/s"
        num_connections = min(-(-buffer_bytes // CONNECTION_BYTES), MAX_CONNECTIONS)
        values = (
            (support.buffer, buffer_bytes),
            (support.message, message_bytes),
            (support.connections, num_connections),
        )
        for passing, number in values:
            if passing is not None:
                yield _pass(image, passing, str(number), "communication", origin)
    elif path.kind == "best-effort" and support.proxy is not None:
        yield _pass(image, support.proxy, support.proxy_value, "communication", "links without reserved bandwidth")


def reserved_sizes(in_flight_bytes: int) -> tuple[int, int]:
    """Return the sizes of buffer and message for a reserved path: powers of two; the buffer holds twice the path.

    While one half is on the line and waits for its acknowledgement, the other is filled.
    """
    buffer_bytes = MIN_BUFFER_BYTES
    while buffer_bytes < min(2 * in_flight_bytes, MAX_BUFFER_BYTES):
        buffer_bytes *= 2
    return buffer_bytes, max(buffer_bytes // _MESSAGES_PER_BUFFER, MIN_MESSAGE_BYTES)


def _pass(image: Image, passing: Passing, value: str, setting_class: SettingClass, origin: str) -> Setting:
    name = image.passed_name(passing)
    return Setting(name=name, setting_class=setting_class, value=value, passed_as=passing.passed_as, origin=origin)


@cache
def _known_libraries() -> dict[str, LibrarySupport]:
    text = resources.files("isthmus.render").joinpath("libraries.yaml").read_text(encoding="utf-8")
    return TypeAdapter(dict[str, LibrarySupport]).validate_python(yaml.safe_load(text))
