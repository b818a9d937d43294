"""`site_pairs`, `address_option`: options of the commands of the wide-area network."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.core.errors import InputError
from isthmus.wan import parse_address


def site_pairs(option: str, given: Sequence[str]) -> list[tuple[str, str]]:
    """Return names and values of options `NAME=VALUE`; raise `InputError` for another form or a name that repeats."""
    found: list[tuple[str, str]] = []
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise InputError(f"{option} {text!r} is not SITE=VALUE", hint="such as --peer hangzhou=10.0.0.2:7400")
        if name in dict(found):
            raise InputError(f"{option} names {name} twice", hint="several proxies of a site: HOST:PORT,HOST:PORT")
        found.append((name, value))
    return found


def address_option(text: str, *, any_port: bool = False) -> tuple[str, int]:
    """Return host and port; port 0 means any where `any_port` is set."""
    if any_port and text.endswith(":0"):
        host, _ = parse_address(text[:-1] + "1")
        return host, 0
    return parse_address(text)
