"""`CommandConfig`: the program that a job with `engine: command` runs at its sites, and how many ranks of it."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from isthmus.core.base_model import FrozenModel, Name, PositiveFloat, PositiveInt

MAX_ARGUMENTS = 1000
"""Most arguments of a command."""
MAX_ARGUMENT_CHARS = 32_768
"""Longest argument of a command, and longest value of a variable."""
MAX_RANKS = 65_536
"""Most ranks of a job."""
NO_FILE = "command://none"
"""Stands for the files that a job with `engine: command` does not name."""
RANK_VARIABLES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
)
"""Variables that tell a rank where it is, as torchrun names them."""
_SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "API_KEY", "ACCESS_KEY", "PRIVATE_KEY")


def _without_null(text: str) -> str:
    if "\0" in text:
        raise ValueError("it contains a null character")
    return text


Argument = Annotated[str, Field(max_length=MAX_ARGUMENT_CHARS), AfterValidator(_without_null)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]


class CommandConfig(FrozenModel):
    """A program and its ranks.

    `arguments` are the program and its arguments, as a list: no shell reads them. A name without `/` is looked up in
    `PATH`. `ranks` are counted by cluster, `chips_per_rank` are on one node. `node_groups` names the node group at a
    cluster; without it the one with the most free chips is taken. `environment` adds variables, which everyone who may
    see the job may read: it is no place for secrets.

    A silent program is alive as long as its process is. With `silence_s` a rank that has written nothing for that
    time fails. `steps` is the number of steps that the program reports, if it reports any.
    """

    arguments: Annotated[tuple[Argument, ...], Field(min_length=1, max_length=MAX_ARGUMENTS)]
    ranks: Annotated[dict[Name, PositiveInt], Field(min_length=1)]
    chips_per_rank: PositiveInt = 1
    node_groups: dict[Name, Name] = Field(default_factory=dict)
    environment: Annotated[dict[VariableName, Argument], Field(max_length=256)] = Field(default_factory=dict)
    silence_s: PositiveFloat | None = None
    steps: PositiveInt | None = None

    @model_validator(mode="after")
    def _check(self) -> CommandConfig:
        if not self.arguments[0]:
            raise ValueError("arguments: the first one is empty; it names the program")
        if self.num_ranks > MAX_RANKS:
            raise ValueError(f"ranks: {self.num_ranks} in all, at most {MAX_RANKS}")
        for name in self.environment:
            if name in RANK_VARIABLES or name.startswith("ISTHMUS_"):
                raise ValueError(f"environment: {name} is set for each rank; leave it out")
            if any(word in name.upper() for word in _SECRET_WORDS):
                raise ValueError(f"environment: {name} names a secret, and a job is shown; put it into a file")
        for cluster in self.node_groups:
            if cluster not in self.ranks:
                raise ValueError(f"node_groups: {cluster} has no ranks; clusters with ranks: {', '.join(self.ranks)}")
        return self

    @property
    def num_ranks(self) -> int:
        """Number of ranks at all clusters."""
        return sum(self.ranks.values())
