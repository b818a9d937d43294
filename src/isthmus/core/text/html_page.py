"""Self-contained HTML pages in one look, light and dark: `render_page`, `page_style`, `html_table`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib import resources

from isthmus.core.text.printable import LINE_BREAKS, printable

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page_text(text: str) -> str:
    """Return `text` for the body or an attribute of a page: escaped, with its hidden characters shown."""
    return escape(printable(text, keep=LINE_BREAKS))


@cache
def page_style() -> str:
    """Return the style sheet of every page."""
    return resources.files("isthmus.core.text").joinpath("page.css").read_text(encoding="utf-8")


def render_page(title: str, brand: str, body: str, *, style: str = "") -> str:
    """Return a page without scripts, which loads nothing: `title` and `brand` are text, `body` is HTML.

    `style` is added to the style sheet.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        '<meta name="color-scheme" content="light dark"/>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"/>'
        f"<title>{page_text(title)}</title><style>{page_style()}{style}</style></head><body><main>"
        f'<header><p class="brand">{page_text(brand)}</p><h1>{page_text(title)}</h1></header>'
        f"{body}</main></body></html>\n"
    )


def fact_list(facts: Iterable[tuple[str, str]]) -> str:
    """Return a list of names and values."""
    listed = "".join(f"<div><dt>{page_text(name)}</dt><dd>{page_text(value)}</dd></div>" for name, value in facts)
    return f'<dl class="facts">{listed}</dl>'


def html_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Iterable[int] = (),
    raw: Sequence[int] = (),
    caption: str = "",
) -> str:
    """Return a table; columns in `numbers` are right-aligned, columns in `raw` are HTML.

    A wide table scrolls, also by keyboard.
    """
    right = set(numbers)

    def cell(tag: str, index: int, text: str) -> str:
        kind = ' class="number"' if index in right else ""
        scope = ' scope="col"' if tag == "th" else ""
        return f"<{tag}{scope}{kind}>{text if tag == 'td' and index in raw else page_text(text)}</{tag}>"

    head = "".join(cell("th", i, text) for i, text in enumerate(columns))
    body = "".join("<tr>" + "".join(cell("td", i, x) for i, x in enumerate(row)) + "</tr>" for row in rows)
    said = f"<caption>{page_text(caption)}</caption>" if caption else ""
    table = f"<table>{said}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>'
