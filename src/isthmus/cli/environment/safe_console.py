"""`SafeConsole`: the rich console of every command. Text is literal: no markup, and hidden characters are shown."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.protocol import rich_cast
from rich.segment import Segment
from rich.text import Span, Text

from isthmus.core.text.printable import LINE_BREAKS, hidden_places, is_printable, printable


class SafeConsole(Console):
    """A console for words from others: what looks like markup, a link or an escape sequence is printed as it is."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of a renderable; only those that rich makes itself control the terminal."""
        cast = rich_cast(renderable)
        if isinstance(cast, str):
            cast = Text(cast)
        if isinstance(cast, Text):
            cast = printable_text(cast, keep=LINE_BREAKS)
        for segment in super().render(cast, options):
            if segment.control or is_printable(segment.text.replace("\n", "").replace("\t", "")):
                yield segment
            else:
                yield Segment(printable(segment.text, keep=LINE_BREAKS), segment.style)


def printable_text(text: Text, *, keep: str = "") -> Text:
    """Return `text` with its styles and with its hidden characters shown, but for those in `keep`."""
    places = hidden_places(text.plain)
    if not places:
        return text
    found = text.blank_copy()
    for piece in text.divide(sorted({*places, *(place + 1 for place in places)})):
        shown = printable(piece.plain, keep=keep)
        if shown == piece.plain:
            found.append_text(piece)
        else:
            spans = [Span(0, len(shown), span.style) for span in piece.spans]
            found.append_text(Text(shown, style=piece.style, spans=spans))
    return found
