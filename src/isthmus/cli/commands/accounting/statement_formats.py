"""Statements as CSV, as CSV with the columns of FOCUS (FinOps Open Cost and Usage Specification 1.1), and as a page."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal

from isthmus.core.text.html_page import html_table, page_text, render_page
from isthmus.core.text.printable import printable
from isthmus.core.units import format_seconds
from isthmus.core.views.ledger_views import StatementLine, StatementView
from isthmus.core.views.wait_views import OwnerStatement

_UNITS = {"chips": "chip-hours", "storage": "TB-hours", "link": "Gbit/s-hours"}
_TITLES = {
    "usage": "held", "proven": "held while the site was away", "late": "credited back: a site was late",
    "lost": "credited back: an owner lost the attempt",
}  # fmt: skip
_FORMULA_STARTS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""What spreadsheets take for the begin of a formula, in both widths (OWASP, "CSV Injection")."""
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_PAGE_COLUMNS = (
    "job", "user", "what", "resource", "phase", "from", "to", "quantity", "price per hour", "amount",
)  # fmt: skip


def statement_csv(found: StatementView) -> str:
    """Return the lines of a statement as CSV, with the carried remainders and the total as the last rows."""
    rows = [
        (
            line.job, line.user, line.kind, line.cluster, line.resource, line.phase, _time(line.first_ms),
            _time(line.last_ms), line.quantity, _unit(line), _money(line.price_millionths, 6), found.currency,
            line.millionths, _money(line.cents, 2), line.project,
        )
        for line in found.lines
    ]  # fmt: skip
    header = (
        "job", "user", "kind", "cluster", "resource", "phase", "first", "last", "quantity", "unit", "price_per_hour",
        "currency", "millionths", "amount", "project",
    )  # fmt: skip
    empty = ("",) * 11
    carried = [
        ("carried in", *empty, found.carried_in_millionths, "", ""),
        ("carried out", *empty, found.carried_out_millionths, "", ""),
        ("total", *empty, "", _money(found.total_cents, 2), ""),
    ]
    return _csv(header, [*rows, *carried, *_wait_rows(found)])


def _wait_rows(found: StatementView) -> Iterator[tuple[object, ...]]:
    """Yield a row for each waiting time of an owner's own users, in seconds, and one for the verdict."""
    waits = found.waits if isinstance(found, OwnerStatement) else None
    if waits is None:
        return
    for name, one in waits.figures.items():
        for figure, value_s in (("mean", one.mean_s), ("median", one.median_s), ("95 of 100", one.p95_s)):
            yield (f"wait {name}: {figure}", *("",) * 7, round(value_s, 3), "s", *("",) * 5)
    yield (f"waits: {waits.verdict}", *("",) * 14)


def statement_focus(found: StatementView) -> str:
    """Return the lines of a statement with the columns of FOCUS 1.1, amounts exact to the millionth."""
    columns = [_focus_row(found, line) for line in found.lines]
    header = tuple(_focus_row(found, _EMPTY_LINE))
    return _csv(header, [tuple(row.values()) for row in columns])


def statement_page(found: StatementView) -> str:
    """Return a statement as an HTML page that loads nothing."""
    title = f"Statement of {found.party} {found.name}, {found.month}"
    state = "final" if found.final else f"up to {_time(found.until_ms)}"
    when = f"{_time(found.begin_ms)} to {_time(found.end_ms)} (UTC), {state}; amounts in {found.currency}."
    carried = (
        f"Carried in: {found.carried_in_millionths} millionths. "
        f"Carried into the next month: {found.carried_out_millionths} millionths."
    )
    total = f"Total: {_money(found.total_cents, 2)} {found.currency}"
    table = html_table(_PAGE_COLUMNS, [[str(one) for one in _page_cells(line)] for line in found.lines], (7, 8, 9))
    notes = f"<p>{page_text(carried)}</p><p><strong>{page_text(total)}</strong></p>"
    return render_page(title, "Isthmus", f"<p>{page_text(when)}</p>{table}{notes}{_quotes(found)}{_waits(found)}")


def _quotes(found: StatementView) -> str:
    """Return the table of what jobs were predicted to cost at their start, beside what they have cost."""
    if not found.quotes:
        return ""
    rows = [
        [one.job, _money(one.quoted_millionths, 6), _money(one.cost_millionths, 6)] for one in found.quotes
    ]  # fmt: skip
    return "<h2>Predicted and actual cost</h2>" + html_table(("job", "predicted", "so far"), rows, (1, 2))


def _waits(found: StatementView) -> str:
    """Return the table of how long an owner's own users waited in the pool, and would have alone."""
    waits = found.waits if isinstance(found, OwnerStatement) else None
    if waits is None:
        return ""
    rows = [
        [name, *map(format_seconds, (one.mean_s, one.median_s, one.p95_s))] for name, one in waits.figures.items()
    ]  # fmt: skip
    verdict = f"{waits.users} users, {waits.jobs} jobs: {waits.verdict}{'' if waits.final else ' so far'}"
    table = html_table(("waits", "mean", "median", "95 of 100"), rows, (1, 2, 3)) if rows else ""
    title = page_text("Waits of this owner's own users")
    return f"<h2>{title}</h2><p>{page_text(verdict)}</p>{table}"


FORMATS: Mapping[str, Callable[[StatementView], str]] = {
    "csv": statement_csv, "focus": statement_focus, "html": statement_page,
}  # fmt: skip
"""The formats besides JSON."""

_EMPTY_LINE = StatementLine(job="", user="", kind="usage", first_ms=0, last_ms=0, millionths=0, cents=0)


def _focus_row(found: StatementView, line: StatementLine) -> dict[str, object]:
    cost, price = _money(line.millionths, 6), _money(line.price_millionths, 6)
    credit = line.kind in ("late", "lost")
    return {
        "BilledCost": cost,
        "BillingAccountId": found.name,
        "BillingCurrency": found.currency,
        "BillingPeriodEnd": _time(found.end_ms),
        "BillingPeriodStart": _time(found.begin_ms),
        "ChargeCategory": "Credit" if credit else "Usage",
        "ChargeClass": "",
        "ChargeDescription": _TITLES.get(line.kind, line.kind),
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodEnd": _time(line.last_ms),
        "ChargePeriodStart": _time(line.first_ms),
        "ConsumedQuantity": "" if credit else line.quantity,
        "ConsumedUnit": _unit(line),
        "ContractedCost": cost,
        "EffectiveCost": cost,
        "InvoiceIssuerName": "isthmus",
        "ListCost": cost,
        "ListUnitPrice": "" if credit else price,
        "PricingCategory": "" if credit else "Standard",
        "PricingQuantity": "" if credit else line.quantity,
        "PricingUnit": _unit(line),
        "ProviderName": line.cluster,
        "PublisherName": line.cluster,
        "ResourceId": line.job,
        "ServiceCategory": {"storage": "Storage", "link": "Networking"}.get(_kind(line), "Compute"),
        "ServiceName": line.resource,
        "SubAccountId": line.user,
        "Tags": json.dumps({"project": line.project}) if line.project else "",
    }


def _page_cells(line: StatementLine) -> Sequence[str]:
    what = _TITLES.get(line.kind, line.kind)
    quantity = f"{line.quantity} {_unit(line)}" if line.resource else ""
    price = _money(line.price_millionths, 6) if line.resource else ""
    return (
        line.job, line.user, what, line.resource or line.cluster, line.phase, _time(line.first_ms), _time(line.last_ms),
        quantity, price, _money(line.cents, 2),
    )  # fmt: skip


def _kind(line: StatementLine) -> str:
    return "link" if ">" in line.resource else "storage" if line.resource.endswith(":storage") else "chips"


def _unit(line: StatementLine) -> str:
    return _UNITS[_kind(line)] if line.resource else ""


def _money(amount: int, decimals: int) -> str:
    """Return an integer of the last decimal as a decimal number."""
    return f"{Decimal(amount).scaleb(-decimals):.{decimals}f}"


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return rows as CSV; text that a spreadsheet would execute as a formula begins with an apostrophe.

    Hidden characters are shown.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        writer.writerow([_cell(one) for one in row])
    return stream.getvalue()


def _cell(one: object) -> object:
    if not isinstance(one, str):
        return one
    text = printable(one)
    return f"'{text}" if text.startswith(_FORMULA_STARTS) and not _NUMBER.fullmatch(text) else text
