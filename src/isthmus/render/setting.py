"""`Setting`: one value of a part's configuration, with its class, how it reaches the program, and its origin."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from isthmus.core.base_model import FrozenModel

SettingClass = Literal["training", "resources", "mounts", "library", "communication"]
"""The five classes of configuration (`cross-domain-pooling.txt` 4.1.2 (3))."""

SETTING_CLASSES: tuple[SettingClass, ...] = ("training", "resources", "mounts", "library", "communication")

PassedAs = Literal["argument", "environment", "file", "container"]
"""How a value reaches the program: an argument, an environment variable, a file, or the container around it."""

MAX_VALUE_CHARS = 4096
SettingText = Annotated[str, Field(max_length=MAX_VALUE_CHARS, pattern=r"^[^\x00\r\n]*$")]
"""The text of a value: one line."""

SettingName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x20=]+$")]
"""A variable, an option with its dashes, a path inside the container, or a limit of the container."""


class Setting(FrozenModel):
    """A value with its name as the program sees it; `origin` says who set it (`from` in `render.json`)."""

    name: SettingName
    setting_class: SettingClass = Field(alias="class")
    value: SettingText
    passed_as: PassedAs
    origin: Annotated[str, Field(max_length=256)] = Field(alias="from")

    @property
    def target(self) -> tuple[str, str]:
        """What the setting sets; two settings of one part with the same target contradict each other."""
        return self.passed_as, self.name


def settings_document(settings: Iterable[Setting]) -> str:
    """Return `render.json`: a list of name, class, value, how it is passed, and who set it."""
    return json.dumps([one.model_dump(by_alias=True) for one in settings], indent=1)
