"""`WorkerRights`: what the owner of a site lets the workers of pool jobs do on its machines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from isthmus.core.base_model import FrozenModel, Name

AccountName = Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_.-]{0,31}\$?$")]
"""A name of an account of the machine."""

VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
AbsolutePath = Annotated[str, Field(pattern=r"^/", max_length=1024)]

OTHER_USERS: Literal["*"] = "*"
"""Stands in `run_as` for all users that it does not name."""


class ContainerRules(FrozenModel):
    """Containers for the workers of pool jobs: the agent, as root, runs them by `runc`; at Kubernetes they are pods.

    `images` is a folder with an OCI image layout, and `libraries` maps communication libraries to the site's own `.so`
    files, which `runc` mounts.
    """

    images: AbsolutePath
    libraries: dict[Name, AbsolutePath] = Field(default_factory=dict)


class WorkerRights(FrozenModel):
    """Accounts, files and environment of the workers of pool jobs.

    `run_as` maps users to accounts of the machine (`*`: all others), for an agent that runs as root; a user without an
    account is refused. Without it workers run as the agent's account. The account may be root only with `allow_root`.
    Files that workers create get the `umask`. `environment` names variables of the agent's environment that workers get
    beside the usual ones, and `readable` folders that they may read beside their storage roots and the system's.
    `commands` admits jobs with `engine: command`, which run programs of their users. `templates` is a folder with
    settings in `*.yaml` for all parts that match.
    With `containers` each worker runs in a container of an image that fits its chip.
    """

    run_as: dict[Name | Literal["*"], AccountName] = Field(default_factory=dict)
    allow_root: bool = False
    umask: Annotated[str, Field(pattern=r"^0?[0-7]{3}$")] = "077"
    environment: tuple[VariableName, ...] = ()
    readable: tuple[AbsolutePath, ...] = ()
    commands: bool = False
    templates: AbsolutePath | None = None
    containers: ContainerRules | None = None

    @model_validator(mode="after")
    def _check_root(self) -> WorkerRights:
        if "root" in self.run_as.values() and not self.allow_root:
            raise ValueError("run_as names root: workers run as root only with allow_root: true")
        return self

    def account_of(self, user: str) -> str | None:
        """Return the account that the jobs of `user` run as; None if the policy gives the user none."""
        return self.run_as.get(user) or self.run_as.get(OTHER_USERS)
