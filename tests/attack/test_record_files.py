"""Records of owners are files that other users of a site partly write: bounded, and never taken for another's."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import FileError
from isthmus.core.records.card_record import MAX_LINES, MAX_RECORD_BYTES, RecordedHold, parse_card_lines
from isthmus.core.records.held_interval import HeldInterval, RecordedPart
from isthmus.core.records.kubernetes_records import parse_kubernetes_records
from isthmus.core.records.read_records import RecordFiles, read_records
from isthmus.core.records.slurm_records import parse_slurm_records

HOLD = "0123456789abcdef0123456789abcdef"
HOLDS = {HOLD: RecordedHold(part=RecordedPart("a", 1), units=((2, 3),))}
OWN = (
    "JobId=7 UserId=iso(7) GroupId=iso(7) Name=isthmus-{hold}-0 JobState=COMPLETED Partition=p TimeLimit=1 "
    "StartTime=2026-12-01T00:00:10 EndTime=2026-12-01T00:00:20 NodeList=n"
)


@pytest.mark.parametrize(
    "name", ["x JobId=7 ", f"isthmus-{HOLD}-0 x", f"isthmus-{HOLD}-0x", f"y\tisthmus-{HOLD}-0", "\x00", "|" * 9]
)
def test_the_name_of_another_job_adds_nothing(name: str) -> None:
    """Only a name that is exactly that of an allocation counts."""
    own = OWN.format(hold=HOLD)
    forged = own.replace(f"isthmus-{HOLD}-0", name).replace("JobId=7", "JobId=8")
    assert len(parse_slurm_records([own, forged], "acct", HOLDS, UTC)) == 1
    table = ["JobIDRaw|JobName|User|State|Start|End", f"8|{name}|eve|COMPLETED|2026-12-01T00:00:10|Unknown"]
    assert parse_slurm_records(table, "acct", HOLDS, UTC) == []


def outcome(parse: Callable[[], list[HeldInterval]], *, by_field: bool = False) -> list[HeldInterval] | str:
    """What a parser returns, or the file or field that its error names; no other error may come out."""
    try:
        return parse()
    except FileError as error:
        return (error.field or "") if by_field else error.file


@given(st.text(max_size=200))
def test_any_text_is_refused_with_its_file_or_says_nothing(text: str) -> None:
    """No other error comes out of a parser."""
    for parse in (
        lambda: parse_slurm_records(text.splitlines(), "f", HOLDS, UTC),
        lambda: parse_slurm_records(["JobId=1 ", text], "f", HOLDS, UTC),
        lambda: parse_card_lines(text.splitlines(keepends=True), "f").intervals,
        lambda: parse_kubernetes_records(text.encode("utf-8", "surrogatepass"), "f", HOLDS),
    ):
        assert outcome(parse) in ([], "f")


KEYS = (
    "kind", "name", "metadata", "status", "involvedObject", "reason", "conditions", "type", "phase",
    "containerStatuses", "state", "terminated", "finishedAt", "eventTime",
)  # fmt: skip
words = st.text(max_size=20) | st.sampled_from([f"isthmus-{HOLD}-0-0-x", "Pod", "Scheduled", "Succeeded"])
json_values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=20,
)


@given(st.lists(json_values, max_size=4))
def test_items_of_any_shape_are_refused_with_their_place(items: list[object]) -> None:
    """What an API server never sends is named, not followed."""
    body = json.dumps({"kind": "List", "items": items}).encode()
    found = outcome(lambda: parse_kubernetes_records(body, "f", HOLDS), by_field=True)
    assert isinstance(found, list) or found.startswith("items.")


@pytest.mark.parametrize(
    "body", [b"[" * 200_000, b'{"kind":"List","items":3}', b"\xff\xfe", b'{"kind":"PodList"}', b"3"]
)
def test_a_document_that_is_no_list_is_refused(body: bytes) -> None:
    """Also one that is nested as deep as a file can be."""
    with pytest.raises(FileError):
        parse_kubernetes_records(body, "f", HOLDS)


@pytest.mark.parametrize(
    "line",
    ['{"at_s":1e999,"event":"held"}', '{"at_s":-1,"event":"held"}', '{"at_s":1,"event":"sold"}', '{"at_s":1}',
     '{"at_s":1,"event":"held","job":"../x"}', '{"at_s":1,"event":"held","cards":["%s"]}' % ("c" * 300), "[]", "\x00"],
)  # fmt: skip
def test_a_line_of_cards_that_no_agent_writes_is_named(line: str) -> None:
    """By its number."""
    with pytest.raises(FileError, match="cards:1: "):
        parse_card_lines([line + "\n", '{"at_s":1,"event":"started"}\n'], "cards")


def test_large_files_are_refused(tmp_path: Path) -> None:
    """Before they are read as a whole, and before their lines are."""
    file = tmp_path / "cards.jsonl"
    with file.open("wb") as sparse:
        sparse.truncate(MAX_RECORD_BYTES + 1)
    with pytest.raises(FileError, match="larger than 256 MiB"):
        read_records(RecordFiles(cards=file))
    lines = ["\n"] * (MAX_LINES + 1)
    with pytest.raises(FileError, match=f"more than {MAX_LINES:,} lines"):
        parse_card_lines(lines, "cards")
    with pytest.raises(FileError, match=f"more than {MAX_LINES:,} lines"):
        parse_slurm_records(lines, "acct", HOLDS)
