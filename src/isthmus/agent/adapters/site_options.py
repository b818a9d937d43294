"""Checks of the options in a `site.yaml`; what is wrong is named by its place in the file."""

from __future__ import annotations

import math
from collections.abc import Collection

from isthmus.core.errors import FieldError
from isthmus.core.files.validation_errors import suggest_name
from isthmus.core.owner.site_file import SiteFile

MIN_TIMEOUT_S = 0.1
"""The least `options.timeout_s` of any kind: below it nothing answers."""


def check_options(site: SiteFile, scheduler: str, known: Collection[str]) -> None:
    """Raise `FieldError` for an option that a site of `scheduler` does not have."""
    for option in site.options:
        if option not in known:
            message = f"unknown option of a {scheduler} site: '{option}'"
            raise FieldError(message, place=("options", option), hint=suggest_name(option, known))


def number_option(
    site: SiteFile, option: str, default: float, *, least: float = 0.0, most: float = 1e9, whole: bool = False
) -> float:
    """Return an option that is a number from `least` to `most`, `default` without it; raise `FieldError` for others."""
    value = site.options.get(option, default)
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except ValueError:
        found = math.nan
    if not least <= found <= most or (whole and found != round(found)):
        kind = "whole number" if whole else "number"
        message, hint = f"'{value}' is no {kind} from {least:g} to {most:g}", f"leave it out for {default:g}"
        raise FieldError(message, place=("options", option), hint=hint)
    return found
