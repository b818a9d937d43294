"""`number_option`: an option of `site.yaml` that is a number, between two bounds."""

from __future__ import annotations

import math

from isthmus.core.errors import InputError
from isthmus.core.owner.site_file import SiteFile

MIN_TIMEOUT_S = 0.1
"""The least `options.timeout_s` of any kind: below it nothing answers."""


def number_option(
    file: SiteFile, option: str, default: float, *, least: float = 0.0, most: float = 1e9, whole: bool = False
) -> float:
    """Return an option of the file, `default` without it; raise `InputError` for anything else."""
    value = file.options.get(option, default)
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except ValueError:
        found = math.nan
    if not least <= found <= most or (whole and found != round(found)):
        kind = "whole number" if whole else "number"
        raise InputError(f"options.{option}: '{value}' is no {kind} from {least:g} to {most:g}")
    return found
