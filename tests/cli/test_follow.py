"""Following a job: the page, the lines, the JSON, and how it ends."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.messages.agent_messages import LogChunk
from tests.cli.fake_server import FakeServer, run
from tests.cli.samples import make_metrics, make_plan


def training(
    end: str = "succeeded", *, steps: int = 40, reason: str = ""
) -> tuple[FakeServer, Callable[[float], None]]:
    """Return a server whose job gains 6 steps a look and ends as `end`, and the sleep that drives it."""
    server = FakeServer()
    view = server.add(state="choosing", plan=None)
    coming = make_metrics(steps)
    taken = [0]

    def sleep(_: float) -> None:
        taken[0] += 18
        server.metrics[view.id] = coming[: taken[0]]
        done = taken[0] >= len(coming)
        server.add(state=end if done else "running", reason=reason if done else "", plan=make_plan())

    return server, sleep


def test_watch_prints_plain_lines_off_a_terminal() -> None:
    """One line at each change with step, loss, speed and time to go, and one at the end; a choice is pointed at."""
    server, sleep = training()
    done = run(server, "watch", "stdlib-moe", sleep=sleep)
    lines = done.out.splitlines()
    assert done.status == 0
    assert "isthmus plans j-3f9a2c" in lines[0]
    assert "step 6/40" in lines[1]
    assert "tokens/s" in lines[1]
    assert "left" in lines[1]
    assert lines[-4].endswith("succeeded")
    assert re.fullmatch(r"j-3f9a2c  step 40/40  loss [\d.]+  [\d,]+ tokens/s", lines[-3])
    assert lines[-2].startswith("validation loss") or "perplexity" in lines[-2]
    assert lines[-1] == "/runs/model (Hugging Face format, at qingyang and the sites that share its storage)"
    assert len(lines) == len(set(lines)) == 11


def test_watch_as_json_gives_an_object_a_line() -> None:
    """Steps only grow, the last state is the job's end, and every stage and link is in it."""
    server, sleep = training()
    done = run(server, "watch", "stdlib-moe", "--json", sleep=sleep)
    lines = done.lines
    steps = [line["step"] for line in lines if line["step"] is not None]
    assert steps == sorted(steps)
    assert steps[-1] == 39
    last = lines[-1]
    assert (last["state"], last["steps_done"], last["steps"], last["eta_s"]) == ("succeeded", 40, 40, 0)
    assert [stage["cluster"] for stage in last["stages"]] == ["qingyang", "hangzhou", "nanjing"]
    assert all(link["mbps"] > 0 for link in last["links"])
    assert len(last["links"]) == 4


@pytest.mark.parametrize("end", ["failed", "cancelled"])
@pytest.mark.parametrize("as_json", [False, True])
def test_watch_succeeds_only_if_the_job_did(end: str, as_json: bool) -> None:
    """Otherwise it exits 1 with the reason and where to read on."""
    server, sleep = training(end, reason="rank 1 exited with 3")
    done = run(server, "watch", "stdlib-moe", *(["--json"] if as_json else []), sleep=sleep)
    assert done.status == 1
    message = done.lines[-1]["message"] if as_json else done.err
    assert f"{end}: rank 1 exited with 3" in message
    assert "isthmus logs" in (done.lines[-1]["hint"] if as_json else done.err)


def test_watch_draws_a_page_on_a_terminal() -> None:
    """State, progress, curve, stages with their shares, links with their capacity."""
    server, sleep = training()
    done = run(server, "watch", "stdlib-moe", terminal=True, environ={"COLUMNS": "140"}, sleep=sleep)
    assert done.status == 0
    for word in ("40/40", "loss", "█", "qingyang > hangzhou", "1000", "nanjing"):
        assert word in done.out


def test_watch_waits_for_a_server_that_is_away_but_not_for_ever() -> None:
    """A short outage is ridden out; a long one ends with exit 8."""
    server, sleep = training()

    def outage(seconds: float) -> None:
        if len(server.seen) == 8:
            server.outages = 6
        sleep(seconds)

    assert run(server, "watch", "stdlib-moe", sleep=outage).status == 0

    server, sleep = training()

    def away(seconds: float) -> None:
        server.outages = 10**6
        sleep(seconds)

    assert run(server, "watch", "stdlib-moe", sleep=away).status == 8


@pytest.mark.parametrize("words", [("watch", "j-3"), ("logs", "j-3", "-f"), ("plans", "j-3")])
def test_ctrl_c_ends_quietly(words: tuple[str, ...]) -> None:
    """Exit 130, no message, no trace."""
    server = FakeServer()
    server.add(state="planning", plan=None, plans=None)

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    done = run(server, *words, sleep=interrupt)
    assert done.status == 130
    assert done.err == ""


def test_a_restarted_job_shows_its_later_attempt() -> None:
    """A step that was computed twice counts as the later attempt had it."""
    server, sleep = training()
    view = next(iter(server.jobs.values()))
    again = [one.model_copy(update={"attempt": 2, "values": {"loss": 9.0}}) for one in make_metrics(1)]
    server.metrics[view.id] = [*make_metrics(1), *again]
    server.add(state="succeeded")
    assert run(server, "watch", view.id, "--json", sleep=sleep).lines[-1]["loss"] == 9.0


def chunks_of(text: str, cuts: list[int], rank: int) -> list[LogChunk]:
    """Cut `text` at `cuts` into pieces of a log."""
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    starts = [0, *ends]
    return [
        LogChunk(job="j", attempt=1, rank=rank, offset=a, text=text[a:b]) for a, b in zip(starts, ends, strict=False)
    ]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.text("ab\t ", min_size=1, max_size=8), min_size=1, max_size=6),
    st.lists(st.integers(0, 60), max_size=6),
    st.booleans(),
)
def test_logs_print_whole_lines_however_they_were_cut(lines: list[str], cuts: list[int], ended: bool) -> None:
    """Pieces that end anywhere become the lines they came from, each named with its rank."""
    server = FakeServer(page_size=2)
    view = server.add(state="succeeded")
    text = "\n".join(lines) + ("\n" if ended else "")
    server.logs[view.id] = chunks_of(text, cuts, 3)
    assert run(server, "logs", view.id).out == "".join(f"3 | {line}\n" for line in lines)
    assert run(server, "logs", view.id, "--rank", "3").out == "".join(f"{line}\n" for line in lines)
    assert "".join(piece["text"] for piece in run(server, "logs", view.id, "--json").lines) == text


def test_logs_follow_until_the_job_ends() -> None:
    """What comes after the end was seen is still printed; two ranks' lines do not mix."""
    server = FakeServer()
    view = server.add(state="running")
    server.logs[view.id] = chunks_of("one\ntw", [3], 0) + chunks_of("x\n", [], 1)

    def end(_: float) -> None:
        server.logs[view.id] += chunks_of("o\nthree", [], 0)
        server.add(state="succeeded")

    done = run(server, "logs", view.id, "-f", sleep=end)
    assert done.out == "0 | one\n1 | x\n0 | two\n0 | three\n"
    assert done.status == 0


def test_logs_follow_waits_for_a_server_that_restarts_and_repeats_nothing() -> None:
    """An outage in the middle of the pages is ridden out; without -f it is an error (exit 8)."""
    server = FakeServer(page_size=1)
    view = server.add(state="running")
    server.logs[view.id] = chunks_of("one\n", [], 0) + chunks_of("two\n", [], 0)

    def fail_once(fake: FakeServer, name: str) -> None:
        if name.endswith("/logs") and fake.seen.count(name) == 2:
            fake.outages = 6

    def end(_: float) -> None:
        if not server.outages:
            server.add(state="succeeded")

    server.before_answer = fail_once
    done = run(server, "logs", view.id, "-f", sleep=end)
    assert (done.status, done.out) == (0, "0 | one\n0 | two\n")
    server.outages = 10
    assert run(server, "logs", view.id).status == 8
