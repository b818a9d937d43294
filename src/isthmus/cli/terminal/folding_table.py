"""`FoldingTable`: a table whose last columns move below their row where the terminal is too narrow for all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from isthmus.cli.environment.safe_console import printable_text
from isthmus.core.text.printable import printable

GAP = 2
"""Characters between two columns."""
INDENT = 4
"""Indentation of the folded cells of a row."""
MAX_WORD_WIDTH = 32
"""Longer words, such as paths, may be broken on narrow terminals."""
MIN_TEXT_WIDTH = 24
"""Text wraps between words only in columns of at least this width."""


class FoldingTable:
    """A plain table; columns listed in `right` (separated by `|`) are right-aligned and never wrap.

    Text wraps between words. Columns for which the terminal has no room follow their row, indented, as
    `name: value`, so that no column gets narrower than its values need. The first column always stays.
    """

    def __init__(
        self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]], right: str = ""
    ) -> None:
        self._title, self._columns = title, list(columns)
        self._rows = [[_cell(cell) for cell in row] for row in rows]
        self._right = [column in right.split("|") for column in columns]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the title, the header and the rows within the width of the terminal."""
        widths = self.column_widths(options.max_width)
        if self._title:
            yield Text(self._title, style="bold")
        if any(self._columns[: len(widths)]):
            yield self._line([Text(name, style="dim") for name in self._columns], widths)
        for row in self._rows:
            yield self._line(row, widths)
            for folded in self._folded(row, len(widths)):
                # Wrapped here: without a terminal, rich would cut the lines instead.
                for line in folded.wrap(console, max(1, options.max_width - INDENT), no_wrap=False, overflow="fold"):
                    yield Text(" " * INDENT).append_text(line)

    def column_widths(self, max_width: int) -> list[int]:
        """Return the widths of the leading columns that fit into `max_width` characters."""
        least = [self._least_width(index) for index in range(len(self._columns))]
        count = 1
        while count < len(least) and sum(least[: count + 1]) + GAP * count <= max_width:
            count += 1
        widths = [min(max_width, width) for width in least[:count]]
        left = max_width - sum(widths) - GAP * (count - 1)
        wanted = sorted((self._full_width(index) - width, index) for index, width in enumerate(widths))
        for place, (more, index) in enumerate(wanted):
            given = max(0, min(more, left // (count - place)))
            widths[index] += given
            left -= given
        return widths

    def _cells(self, index: int) -> list[Text]:
        return [row[index] for row in self._rows]

    def _full_width(self, index: int) -> int:
        return max(len(self._columns[index]), *(cell.cell_len for cell in self._cells(index)), 0)

    def _least_width(self, index: int) -> int:
        """Return the width below which a column is unreadable."""
        header = max(map(len, self._columns[index].split()), default=0)
        if self._right[index]:
            return max(header, *(cell.cell_len for cell in self._cells(index)), 0)
        words = [Text(word).cell_len for cell in self._cells(index) for word in cell.plain.split()]
        widest = max((cell.cell_len for cell in self._cells(index)), default=0)
        return max(header, min(MAX_WORD_WIDTH, max(words, default=0)), min(MIN_TEXT_WIDTH, widest))

    def _line(self, cells: Sequence[Text], widths: Sequence[int]) -> Table:
        line = Table(box=None, show_header=False, pad_edge=False, padding=(0, GAP, 0, 0))
        for index, width in enumerate(widths):
            line.add_column(width=width, justify="right" if self._right[index] else "left", overflow="fold")
        line.add_row(*cells[: len(widths)])
        return line

    def _folded(self, row: Sequence[Text], start: int) -> list[Text]:
        """Return the cells from column `start` on: short ones share lines, long ones have their own."""
        short, lines = Text(), []
        for name, cell in list(zip(self._columns, row, strict=True))[start:]:
            if cell.plain in ("", "-"):
                continue
            piece = Text.assemble((f"{name}: " if name else "", "dim"), cell)
            if cell.cell_len > MIN_TEXT_WIDTH:
                lines.append(piece)
                continue
            short = short.append_text(Text("  ·  ", style="dim")).append_text(piece) if short.plain else piece
        return ([short] if short.plain else []) + lines


def _cell(text: str | Text) -> Text:
    """Return a cell as one line with its hidden characters shown: its width counts them."""
    return printable_text(text) if isinstance(text, Text) else Text(printable(text))
