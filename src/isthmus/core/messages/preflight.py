"""Preflight: the checks of a job at the sites of its plan before chips are held, as messages between server and agent.

The server sends a `PreflightOrder` with every sync until all sites have answered; the agent repeats its
`PreflightAnswer` until the order is gone. Phase `own`: a site checks its own files and storage. Phase `peers`, for a
plan with several sites: each site looks for what the others have left or opened in the first phase.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isthmus.core.base_model import FrozenModel, Name, NonNegativeFloat, NonNegativeInt, PositiveInt

MAX_CHECKS = 256
"""Most checks of one site in one phase."""

MAX_DETAIL_CHARS = 600
MAX_FACT_CHARS = 1200
"""Longest detail of a result, and longest fact."""

ANSWER_TIMEOUT_S = 8.0
"""Longest time that one request to the server waits for the answers of sites."""

Fact = Annotated[str, Field(max_length=MAX_FACT_CHARS)]

CheckKind = Literal["model", "data", "file", "write", "space", "marker", "resume"]
"""`model`: a folder or file with the model's configuration, with weights if `value` is `weights`; `data`: a file,
folder or glob with a readable file; `file`: a readable file; `write`: a folder that can be written, in which the
file `value` is left if there is a value; `space`: `num_bytes` are free at `path`; `marker`: the folder holds the
file `value` that site `peer` has left in its folder `peer_path`; `resume`: a folder with a complete checkpoint."""

PreflightPhase = Literal["own", "peers"]

CheckStatus = Literal["passed", "failed", "unknown"]
"""`unknown`: the check did not finish within its time; it is repeated."""


class SiteCheck(FrozenModel):
    """One check at a site. `name` says what is checked: `data`, `model`, `checkpoints`."""

    kind: CheckKind
    name: Name
    path: str = ""
    num_bytes: NonNegativeInt = 0
    value: str = ""
    peer: str = ""
    peer_path: str = ""


class PreflightOrder(FrozenModel):
    """The checks of a job at one site in one phase; `round` counts the preflights of the job.

    `user` submits the job. `temporary`: the folders that the checks make are removed afterwards (a dry run).
    """

    job: Name
    user: str = ""
    round: PositiveInt
    phase: PreflightPhase = "own"
    temporary: bool = False
    checks: Annotated[tuple[SiteCheck, ...], Field(max_length=MAX_CHECKS)]


class CheckResult(FrozenModel):
    """The result of one check: `detail` says what was found with which value, `hint` what to do."""

    name: Name
    status: CheckStatus
    detail: Annotated[str, Field(max_length=MAX_DETAIL_CHARS)] = ""
    hint: Annotated[str, Field(max_length=MAX_DETAIL_CHARS)] = ""
    peer: Annotated[str, Field(max_length=63)] = ""


class PreflightAnswer(FrozenModel):
    """A site's results of one phase, in the order of the checks; `facts` go to the other sites of the job."""

    job: Name
    round: PositiveInt
    phase: PreflightPhase
    results: Annotated[tuple[CheckResult, ...], Field(max_length=MAX_CHECKS)]
    facts: Annotated[dict[Name, Fact], Field(max_length=8)] = Field(default_factory=dict)
    seconds: NonNegativeFloat = 0.0


class SitePreflight(FrozenModel):
    """The preflight of a job at one site, as shown to its user.

    `state` is `passed`, `failed`, `waiting` (the site has not answered yet) or `not checked` (its agent executes no
    checks).
    """

    cluster: Name
    state: Literal["passed", "failed", "waiting", "not checked"]
    results: tuple[CheckResult, ...] = ()
    seconds: NonNegativeFloat = 0.0
