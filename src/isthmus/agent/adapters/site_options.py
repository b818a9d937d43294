"""Checks of the options in a `site.yaml`; what is wrong is named by its place in the file."""

from __future__ import annotations

from collections.abc import Collection

from isthmus.core.errors import FieldError
from isthmus.core.files.validation_errors import suggest_name
from isthmus.core.owner.site_file import SiteFile


def check_options(site: SiteFile, scheduler: str, known: Collection[str]) -> None:
    """Raise `FieldError` for an option that a site of `scheduler` does not have."""
    for option in site.options:
        if option not in known:
            message = f"unknown option of a {scheduler} site: '{option}'"
            raise FieldError(message, place=("options", option), hint=suggest_name(option, known))


def number_option(site: SiteFile, option: str, default: float, *, most: float = 1e9) -> float:
    """Return an option that is a number from 0 to `most`; raise `FieldError` for anything else."""
    text = str(site.options.get(option, ""))
    try:
        found = float(text) if text else default
    except ValueError:
        found = -1.0
    if not 0 <= found <= most:
        raise FieldError(f"'{text}' is no number from 0 to {most:g}", place=("options", option))
    return found
