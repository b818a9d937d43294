"""`printable`: which characters are shown by their number, and which stay."""

from __future__ import annotations

import json
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.text.printable import LINE_BREAKS, hidden_places, is_printable, printable, visible_json

HIDDEN = ("Cc", "Cf", "Co", "Cs", "Zl", "Zp")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, café, 数据, \N{NO-BREAK SPACE}, 😀", "plain text, café, 数据, \N{NO-BREAK SPACE}, 😀"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("bell \x07, delete \x7f, CSI \x9b2J", "bell \\x07, delete \\x7f, CSI \\x9b2J"),
        ("a\nb\tc\rd", "a\\nb\\tc\\rd"),
        ("\u202egnp.exe", "<U+202E>gnp.exe"),
        ("a\u2066b\u2069 \u200b \u2028 \ufeff \xad", "a<U+2066>b<U+2069> <U+200B> <U+2028> <U+FEFF> \\xad"),
        ("\ue000 \ud800 \U000e0041 \u3164", "<U+E000> <U+D800> <U+E0041> <U+3164>"),
    ],
)
def test_a_hidden_character_is_shown_by_its_number(text: str, shown: str) -> None:
    """Control, escape, bidirectional, invisible, private and half characters; letters of any script stay."""
    assert printable(text) == shown


def test_every_character_of_the_hidden_categories_is_shown_and_no_other() -> None:
    """The literal pattern agrees with the Unicode data of this Python, but for characters that it does not know yet."""
    found = {chr(n) for n in range(sys.maxunicode + 1) if not is_printable(chr(n))}
    wanted = {chr(n) for n in range(sys.maxunicode + 1) if unicodedata.category(chr(n)) in HIDDEN}
    assert wanted <= found
    assert {unicodedata.category(char) for char in found - wanted} <= {"Cn", "Lo"}
    assert {char for char in found - wanted if unicodedata.category(char) == "Lo"} == set("\u115f\u1160\u3164\uffa0")


@given(text=st.text(), keep=st.sampled_from(["", LINE_BREAKS]))
def test_nothing_hidden_is_left(text: str, keep: str) -> None:
    """Only what is kept; a text without hidden characters is unchanged."""
    shown = printable(text, keep=keep)
    assert {shown[place] for place in hidden_places(shown)} <= set(keep)
    if is_printable(text):
        assert shown == text


def test_a_long_text_is_cut_with_its_length() -> None:
    """So that one name does not fill a page."""
    assert printable("x" * 1000, max_chars=3) == "xxx... (1000 characters)"
    assert printable("xyz", max_chars=3) == "xyz"


@given(value=st.dictionaries(st.text(), st.text()))
def test_json_stays_the_same_value_and_shows_nothing_raw(value: dict[str, str]) -> None:
    """A parser reads what was written; a terminal that prints it executes nothing."""
    text = visible_json(json.dumps(value, ensure_ascii=False))
    assert json.loads(text) == value
    assert is_printable(text)
