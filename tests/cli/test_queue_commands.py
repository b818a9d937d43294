"""What `isthmus queue` and `isthmus show` print of jobs that wait, and of jobs that run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isthmus.cli.history_text import local_time
from isthmus.core.messages.preflight import CheckResult, SitePreflight
from isthmus.core.plan import Refusal
from isthmus.core.views.api_views import HistoryEvent, VictimView
from isthmus.core.views.queue_status import JobAhead, QueueStatus
from tests.cli.fake_server import FakeServer, run
from tests.cli.samples import START_S, make_metrics, write_job


def standing(**changes: Any) -> QueueStatus:
    """The second of the queue, to start in two minutes."""
    fields = {
        "id": "j-3f9a2c",
        "name": "stdlib-moe",
        "user": "alice",
        "state": "waiting",
        "priority": "middle",
        "submitted_s": START_S - 60,
        "reason": "plan p1 waits for chips at qingyang",
        "place": 2,
        "needs": {"qingyang": {"h20": 2}},
        "refused": (
            Refusal(
                clusters=("qingyang",),
                stage="compute",
                owner="owner-a",
                lacking_nodes=1,
                reason="compute: qingyang (owner-a) has 0 h20 free of the 2 needed",
            ),
        ),
        "ahead": (
            JobAhead(job="j-0001", state="waiting", priority="middle"),
            JobAhead(state="blocked", priority="high"),
        ),
        "start_s": START_S + 120,
        "earliest_s": START_S + 96,
        "latest_s": START_S + 144,
        "notes": ("runs end when predicted",),
    }  # fmt: skip
    return QueueStatus.model_validate(fields | changes)


def server(**changes: Any) -> FakeServer:
    """A server with that one waiting job."""
    made = FakeServer()
    view = made.add(state=changes.get("state", "waiting"), plan=None, plans=None, parts=())
    made.standings[view.id] = standing(**changes)
    return made


def test_show_says_why_behind_whom_until_when() -> None:
    """What is lacking with the stage that found so and the owner; another user's job has no name."""
    done = run(server(), "show", "stdlib-moe")
    assert done.status == 0
    for text in (
        "priority middle, is waiting",
        "reason     plan p1 waits for chips at qingyang",
        "position   2 in the queue",
        "starts     in 2 min 0 s (1 min 36 s to 2 min 24 s)",
        "needs      2 h20 at qingyang",
        "ahead      j-0001, another user's (high)",
        "- runs end when predicted",
    ):
        assert text in done.out
    row = next(line for line in done.out.splitlines() if line.startswith("compute"))
    assert row.split()[:3] == ["compute", "owner-a", "qingyang"]


def test_show_says_what_a_running_part_waits_for() -> None:
    """The part's row names the wait and how long it has lasted."""
    made = FakeServer()
    view = made.add(state="running")
    waits = {"waiting": "rank 0 waits for rank 1 (site b) to write its part of checkpoint 40"}
    part = view.parts[0].model_copy(update=waits | {"waiting_since_s": START_S - 12})
    made.jobs[view.id] = view.model_copy(update={"parts": (part,)})
    words = " ".join(run(made, "show", view.id).out.split())
    assert "site b" in words
    assert "checkpoint 40, 12.0 s" in words


def test_show_lists_the_checks_of_each_site() -> None:
    """One row for what passed at a site, one for each finding with what to do, one for a site without an answer."""
    sites = (
        SitePreflight(
            cluster="east",
            state="failed",
            results=(
                CheckResult(name="model", status="passed"),
                CheckResult(name="checkpoints", status="passed"),
                CheckResult(name="data", status="failed", detail="/d: no file", hint="copy the data"),
            ),
            seconds=0.25,
        ),
        SitePreflight(cluster="west", state="waiting"),
        SitePreflight(cluster="old", state="not checked"),
    )
    made = server()
    made.jobs["j-3f9a2c"] = made.jobs["j-3f9a2c"].model_copy(update={"preflight": sites})
    lines = run(made, "show", "stdlib-moe").out.splitlines()
    rows = [" ".join(line.split()) for line in lines[lines.index("Checks before the start") + 2 :]]
    assert rows[:4] == [
        "east model, checkpoints passed 250.0 ms",
        "east data failed /d: no file; copy the data",
        "west waiting no answer yet",
        "old not checked its agent executes no checks",
    ]


def test_show_names_whose_chips_a_job_could_have() -> None:
    """The victims of an offer: whose, at which owner, how many chips, and the work that would be lost."""
    made = server()
    offer = VictimView(cluster="qingyang", owner="owner-a", job="other-1", attempt=2, chips={"h20": 2}, unsaved_s=90)
    made.jobs["j-3f9a2c"] = made.jobs["j-3f9a2c"].model_copy(update={"offer": (offer,)})
    done = run(made, "show", "stdlib-moe")
    assert "Jobs it could preempt" in done.out
    assert "isthmus preempt j-3f9a2c --yes" in done.out
    row = next(line for line in done.out.splitlines() if line.startswith("other-1"))
    assert row.split() == [
        "other-1",
        "pool",
        "job",
        "qingyang",
        "owner-a",
        "2",
        "h20",
        "1",
        "min",
        "30",
        "s",
    ]


def test_show_says_all_of_it_in_json() -> None:
    """The job's view and its standing, as the server gave them."""
    told = run(server(), "show", "j-3f9a2c", "--json").json
    assert told["job"]["id"] == "j-3f9a2c"
    assert QueueStatus.model_validate(told["queue"]) == standing()


def test_show_of_a_running_job_says_where_it_runs() -> None:
    """Its plan and what its sites say of their parts; nothing of a queue."""
    made = FakeServer()
    made.add()
    done = run(made, "show", "stdlib-moe")
    assert "plan       p1: qingyang 0-2 > hangzhou 3-5 > nanjing 6-7" in done.out
    assert "Parts" in done.out
    assert "place" not in done.out


def test_queue_lists_what_waits() -> None:
    """A line for each, in the server's order; `-` where the start is unknown."""
    made = server()
    made.standings["other"] = standing(id="other", place=None, start_s=None, earliest_s=None, latest_s=None)
    lines = run(made, "queue").out.splitlines()
    assert lines[0].split()[:3] == ["place", "job", "user"]
    assert "in 2 min 0 s (1 min 36 s to 2 min 24 s)" in lines[1]
    assert lines[2].split()[:2] == ["-", "other"]
    assert [one["id"] for one in run(made, "queue", "--json").json] == ["j-3f9a2c", "other"]


def test_an_empty_queue_says_so() -> None:
    """No table without rows."""
    assert run(FakeServer(), "queue").out == "No waiting jobs.\n"


def test_a_dry_run_shows_plans_and_standing_and_submits_nothing(tmp_path: Path) -> None:
    """The plans that it would have, when it should start, what was refused; no job afterwards."""
    made = FakeServer()
    made.standings["dry-run"] = standing(id="dry-run", name="mine")
    done = run(made, "submit", write_job(tmp_path, vocab_size=512), "--dry-run")
    assert done.status == 0
    assert done.out.startswith("dry run of job mine (not submitted); if submitted now:\n")
    assert "starts     in 2 min 0 s (1 min 36 s to 2 min 24 s)" in done.out
    assert "Candidate plans, fastest first" in done.out
    assert made.jobs == {}
    told = run(made, "submit", write_job(tmp_path, vocab_size=512), "--dry-run", "--json").json
    assert told["standing"]["place"] == 2
    assert told["plans"]["plans"][0]["id"] == "p1"


def test_a_dry_run_cannot_be_watched(tmp_path: Path) -> None:
    """There is nothing to watch, and no key for what is not there."""
    done = run(FakeServer(), "submit", write_job(tmp_path, vocab_size=512), "--dry-run", "--watch")
    assert done.status == 2
    assert "--dry-run excludes --watch and --key" in done.err


def failed_server() -> FakeServer:
    """A server with a job that failed after a worker was replaced once."""
    cause = "hangzhou failed its part (ranks 1): out of memory"
    made = FakeServer()
    view = made.add(state="failed", worker_restarts=1, reason=f"{cause}; restarts used: 0 of 0")
    made.metrics[view.id] = make_metrics()
    made.history[view.id] = [
        HistoryEvent(number=1, time_s=START_S, kind="submitted"),
        HistoryEvent(number=2, time_s=START_S + 5, kind="worker-lost", attempt=1, cluster="nanjing", rank=2),
        HistoryEvent(number=3, time_s=START_S + 7, kind="resumed", attempt=1, step=40, seconds=2.0),
        HistoryEvent(number=4, time_s=START_S + 9, kind="lost", attempt=1, cluster="hangzhou", text=cause),
        HistoryEvent(number=5, time_s=START_S + 9, kind="failed", attempt=1, text="restarts used: 0 of 0"),
    ]
    return made


def test_show_tells_the_history_the_held_out_loss_and_what_to_do_next() -> None:
    """Every event with its time, the cause once, perplexity, worker restarts, the next command; oldest first."""
    done = run(failed_server(), "show", "stdlib-moe", environ={"COLUMNS": "160"})
    assert done.status == 0
    places = [done.out.index(word) for word in ("submitted", "worker lost: rank 2 at nanjing", "resumed from step 40")]
    assert places == sorted(places)
    assert local_time(START_S + 5) in done.out
    assert done.out.count("out of memory") == 1
    assert "perplexity" in done.out
    assert "1 worker processes replaced" in done.out
    assert "isthmus logs j-3f9a2c" in done.out


def test_show_bounds_the_history_in_text_and_json_alike() -> None:
    """`--events N` shows the newest N in the same order in both, and text says how many are older."""
    done = run(failed_server(), "show", "stdlib-moe", "--events", "2", environ={"COLUMNS": "160"})
    assert "3 older events" in done.out
    assert "worker lost" not in done.out
    told = run(failed_server(), "show", "stdlib-moe", "--events", "2", "--json").json
    assert [one["number"] for one in told["history"]] == [4, 5]
    assert told["perplexity"] > 1
    assert told["result"] is None
    assert told["next"][0] == "isthmus logs j-3f9a2c"


def test_watch_tells_each_event_once_and_the_cause_once() -> None:
    """Off a terminal events are lines with their time; the last error does not repeat the cause they named."""
    done = run(failed_server(), "watch", "stdlib-moe")
    assert done.status == 1
    assert (done.out + done.err).count("out of memory") == 1
    assert len([line for line in done.out.splitlines() if local_time(START_S + 9) in line]) == 2
    lines = run(failed_server(), "watch", "stdlib-moe", "--json").lines
    assert [event["number"] for line in lines for event in line.get("events", ())] == [1, 2, 3, 4, 5]
