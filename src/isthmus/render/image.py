"""`Image`: what an image says of itself: the chips and drivers it runs on, and how values reach its program."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from isthmus.core.base_model import FrozenModel, Name
from isthmus.render.setting import SettingName, SettingText

MAX_ENTRIES = 256
"""Most chips, parameters or libraries that an image lists."""

IMAGE_LABEL = "io.isthmus.image"
"""Label of an OCI image with its `ImageFacts` as JSON."""

_CONDITION = r"(>=|<=|==|<|>)\d+(\.\d+){0,3}"
DriverRange = Annotated[str, Field(pattern=f"^({_CONDITION}(,{_CONDITION})*)?$", max_length=128)]
"""Versions of a driver, such as `>=535.54,<560`; empty: any."""

CodeSource = Literal["system", "own", "built_in"]
"""Where the program of an image is from: Isthmus itself, a user's folder, or the image."""


class Passing(FrozenModel):
    """How one value reaches a program: as the argument or variable `name`, or as the key `name` of its file.

    The file is `spec.json` of Isthmus' own program and `parameters.json` of any other, in the worker's folder.
    """

    passed_as: Literal["argument", "environment", "file"]
    name: SettingName


class LibrarySupport(FrozenModel):
    """One communication library of an image, and how the program selects it.

    `select` is the argument, variable or file key with `value` that selects it; without `select` it is in use already.
    `across_sites`: it is made for links between clusters. `buffer` and `message` pass the size of its buffers and
    messages in bytes, `connections` the number of connections that it opens to a peer in another cluster, and `proxy`
    the transport `proxy_value` for links without reserved bandwidth.
    """

    select: Passing | None = None
    value: SettingText = ""
    across_sites: bool = False
    buffer: Passing | None = None
    message: Passing | None = None
    connections: Passing | None = None
    proxy: Passing | None = None
    proxy_value: SettingText = "proxy"


class ImageFacts(FrozenModel):
    """What the maker of an image says of it; the image carries it as the label `io.isthmus.image`.

    `chips` are those that it runs on (empty: any), `drivers` the versions of their driver. `libraries` are the
    communication libraries in it; `library_file` is the path of the `.so` that another library may replace.
    `parameters` tells how training parameters reach the program. An image with `host_files` has no system files of its
    own: the site's are mounted read-only.
    """

    chips: Annotated[tuple[Name, ...], Field(max_length=MAX_ENTRIES)] = ()
    drivers: DriverRange = ""
    framework: Name = "isthmus"
    code: CodeSource = "system"
    command: Annotated[tuple[SettingText, ...], Field(max_length=MAX_ENTRIES)] = ()
    parameters: Annotated[dict[Name, Passing], Field(max_length=MAX_ENTRIES)] = Field(default_factory=dict)
    libraries: Annotated[dict[Name, LibrarySupport], Field(max_length=MAX_ENTRIES)] = Field(default_factory=dict)
    library_file: Annotated[str, Field(pattern=r"^/", max_length=1024)] | None = None
    host_files: bool = False


SPEC_FILE, PARAMETERS_FILE = "spec.json", "parameters.json"


class Image(FrozenModel):
    """An image of a site: name, version, content digest, plain labels, variables, and the facts of its maker."""

    name: Annotated[str, Field(min_length=1, max_length=255)]
    version: Annotated[str, Field(max_length=128)]
    digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
    created: Annotated[str, Field(max_length=64)] = ""
    labels: dict[str, str] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)
    facts: ImageFacts = ImageFacts()

    def passed_name(self, passing: Passing) -> str:
        """Return the name of a setting that is passed so: a key in a file is `FILE#KEY`."""
        if passing.passed_as != "file":
            return passing.name
        return f"{SPEC_FILE if self.facts.code == 'system' else PARAMETERS_FILE}#{passing.name}"

    @property
    def reference(self) -> str:
        """Its name and version, as a job may name it."""
        return f"{self.name}:{self.version}"


def host_image(libraries: Iterable[str] = ("nccl", "gloo")) -> Image:
    """Return the image that stands for workers without images: what the nodes have, and Isthmus' own program.

    `libraries` are the communication libraries there beside Isthmus' own.
    """
    facts = ImageFacts(host_files=True, libraries={name: LibrarySupport() for name in ("isthmus", *libraries)})
    return Image(name="host", version="0", digest="sha256:" + "0" * 64, facts=facts)
