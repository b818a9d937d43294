"""Unit suffixes of names, parsing and formatting of sizes and durations, and amounts of money.

`_s` seconds, `_ms` milliseconds, `_bytes` bytes, `_flops` floating-point operations,
`_flop_per_s` operations per second, `_boundary_gbps` 1e9 bit/s, `_bytes_per_s` bytes per second.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from isthmus.core.base_model import MAX_INTEGER

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_FACTORS = {
    "": 1, "b": 1, "k": KB, "m": MB, "g": GB, "t": TB, "kb": KB, "mb": MB, "gb": GB, "tb": TB,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*([kmgt]?i?b?)\s*", re.IGNORECASE)


def parse_bytes(value: Any) -> Any:
    """Parse `"64 MiB"`, `"96GB"`, `"1e9"` or a number as bytes; return anything else unchanged."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        return value
    match = _QUANTITY.fullmatch(value)
    if match is None or match.group(2).lower() not in _FACTORS:
        return value
    num_bytes = float(match.group(1)) * _FACTORS[match.group(2).lower()]
    return round(num_bytes) if math.isfinite(num_bytes) else value


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0, le=MAX_INTEGER)]
"""A number of bytes; files may also use `64 MiB` or `96 GB`."""


def format_bytes(num_bytes: float) -> str:
    """Format bytes in binary units: `format_bytes(2**20)` is `"1.0 MiB"`."""
    for factor, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Format a duration: `0.0123` is `"12.3 ms"`, `75` is `"1 min 15 s"`."""
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest_s} s"


MILLIONTHS = 1_000_000
"""Millionths in one unit of a currency: accounts count in them."""
_MAX_PRICE, _MAX_PRICE_CHARS = Decimal(10) ** 9, 40


def _to_decimal(given: Any) -> Any:
    """Return a number of a file by its shortest decimal form: 2.1 is 2.1, not the nearest binary fraction."""
    text = str(given) if isinstance(given, int | float) and not isinstance(given, bool) else given
    if isinstance(text, str) and len(text) > _MAX_PRICE_CHARS:
        raise ValueError(f"a price has at most {_MAX_PRICE_CHARS} characters")
    return text


def _check_price(price: Decimal) -> Decimal:
    if price < 0:
        raise ValueError(f"a price is at least 0, not {price}")
    if price > _MAX_PRICE:
        raise ValueError(f"a price is at most {_MAX_PRICE}, not {price}")
    if price * MILLIONTHS != int(price * MILLIONTHS):
        raise ValueError(f"a price has at most 6 decimals, not {price}")
    return price


Price = Annotated[Decimal, BeforeValidator(_to_decimal), AfterValidator(_check_price)]
"""A price in units of the currency, at least 0, with at most 6 decimals."""
