"""`CodeRegistration`: a user's `code.yaml`, which says how to start the code and how its parameters are passed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isthmus.core.base_model import FrozenModel, Name
from isthmus.render.image import MAX_ENTRIES, Passing
from isthmus.render.setting import SettingText


class CodeRegistration(FrozenModel):
    """Registration of a user's own code.

    `command` starts it inside the container, in the folder of the code; `parameters` maps parameters of the job to
    arguments, variables, or keys of the file `parameters.json` in the worker's folder.
    """

    version: Literal[1] = 1
    command: Annotated[tuple[SettingText, ...], Field(min_length=1, max_length=MAX_ENTRIES)]
    parameters: Annotated[dict[Name, Passing], Field(max_length=MAX_ENTRIES)] = Field(default_factory=dict)
