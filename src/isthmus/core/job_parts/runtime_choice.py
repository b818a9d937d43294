"""`RuntimeChoice`: what a job says of the image, code and communication library that its parts run with."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from isthmus.core.base_model import FrozenModel, Name, PathName

MAX_CHOICES = 64
"""Most labels, parameters and communication settings that a job names."""

ImageName = Annotated[
    str, Field(pattern=r"^[a-z0-9]+(?:[._/-][a-z0-9]+)*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$", max_length=255)
]
"""A name of an image, with a version after `:`; without one the newest is meant."""

LabelText = Annotated[str, Field(max_length=256)]
COMMUNICATION_PREFIXES = ("NCCL_", "TORCH_NCCL_", "RCCL_", "HCCL_", "GLOO_", "UCX_", "FI_")
_WORDS_OF_FILES = ("PLUGIN", "MODULE", "PATH", "DIR", "FILE", "LIB", "PRELOAD", "CONF")
"""Variables with such a word name files that a library loads or writes: code or another's file by way of data."""


def _check_parameter(name: str) -> str:
    """Return the name of a communication parameter; raise `ValueError` for any other variable."""
    if not name.startswith(COMMUNICATION_PREFIXES):
        raise ValueError(f"'{name}' is no communication parameter: they begin with {', '.join(COMMUNICATION_PREFIXES)}")
    if word := next((one for one in _WORDS_OF_FILES if one in name), None):
        raise ValueError(f"'{name}' names a file ({word}), which a job may not choose; ask the owner for a template")
    return name


ParameterName = Annotated[Name, AfterValidator(_check_parameter)]
ParameterText = Annotated[str, Field(max_length=1024)]


SynchronisationName = Literal[
    "ring", "hierarchical-ring", "2d-torus", "2d-mesh", "parameter-server", "psring", "passing"
]
"""Strategies of `isthmus.strategies` that a run executes: those of ranks alone, and `passing` by `isthmus switch`."""

WireFormatName = Literal["fp32", "bf16", "scaled-int32", "scaled-int16", "block-int8"]
"""Formats in which sums cross between clusters (`isthmus.comm.wire_formats`)."""


class RuntimeChoice(FrozenModel):
    """The image, code and communication library of a job's parts, at sites that run workers from images.

    Without `image` each site takes the newest of its images that fits the chip and has all `labels`. `code` is a folder
    with the user's program and its `code.yaml`. `library` names the communication library, and
    `communication` sets its parameters, which Isthmus otherwise derives from the network.

    `synchronisation` names the strategy by which replicas sum gradients, at any site; its hosts are clusters, which
    must have equally many ranks, but for `passing`. Without it, sums are taken inside clusters and cross between them
    once. `passing` sums in the switches of the pool file whose `addresses` are stated at a cluster of the plan.

    `wire_format` rounds what crosses between clusters to fewer bytes, or to integers, within the bound of the format;
    it goes with the default synchronisation only. `block-int8` adds the rounding error of a step to the next one.
    """

    image: ImageName | None = None
    labels: Annotated[dict[Name, LabelText], Field(max_length=MAX_CHOICES)] = Field(default_factory=dict)
    code: PathName | None = None
    library: Name | None = None
    communication: Annotated[dict[ParameterName, ParameterText], Field(max_length=MAX_CHOICES)] = Field(
        default_factory=dict
    )
    synchronisation: SynchronisationName | None = None
    wire_format: WireFormatName | None = None

    @model_validator(mode="after")
    def _check_wire_format(self) -> RuntimeChoice:
        if self.wire_format is not None and self.synchronisation is not None:
            raise ValueError(
                f"wire_format {self.wire_format} does not go with synchronisation {self.synchronisation}; leave one out"
            )
        return self

    def __hash__(self) -> int:
        """Return a hash, which dictionaries have not: pydantic copies a default value without one at each use."""
        return hash(
            (
                self.image,
                *self.labels.items(),
                self.code,
                self.library,
                *self.communication.items(),
                self.synchronisation,
                self.wire_format,
            )
        )
