"""Commands against a fake server: what they print, in words and as JSON, and how they exit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from isthmus.cli.environment.parse_since import parse_since_s
from isthmus.client.resolve_job import select_job
from isthmus.core.chip import chip_catalogue
from isthmus.core.errors import InputError, NotFoundError
from isthmus.core.files.user_files import FILE_KINDS
from isthmus.core.plan import PlanSet
from isthmus.core.views.api_views import ClusterView, JobView, PoolView, TokenView, UnknownPart, VictimView
from tests.cli.fake_server import FakeServer, run
from tests.cli.samples import START_S, make_metrics, make_plan, make_view

pytestmark = pytest.mark.integration

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "vocab_size": 512,
}


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    """A job file with its model beside it."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: mine\nmodel: config.json\noutput: out\ndata: {paths: [text]}\n"
        "training: {steps: 3, sequence_length: 8, global_batch_size: 2}\ncheckpoints: {folder: ck}\n"
    )
    return file


def test_submit_sends_job_and_model_and_says_what_to_do_next(job_file: Path) -> None:
    """Paths start at the job file; the answer names the commands that follow."""
    server = FakeServer()
    done = run(server, "submit", job_file)
    assert done.status == 0
    (view,) = server.jobs.values()
    assert view.job.model == str(job_file.parent / "config.json")
    assert f"isthmus plans {view.id}" in done.out
    assert f"isthmus choose {view.id} PLAN" in done.out


def test_submit_pins_the_tokenizer_and_says_which(job_file: Path) -> None:
    """Without a tokenizer beside the model it is bytes, aloud; with one it is that; a larger one is not sent."""
    server = FakeServer()
    assert (
        "tokenizer: bytes, one token per byte, since there is no tokenizer.json" in run(server, "submit", job_file).out
    )
    file = job_file.parent / "tokenizer.json"
    file.write_text('{"model": {"vocab": {"a": 511}}}')
    assert f"tokenizer: {file}, the model's own" in run(server, "submit", job_file).out
    assert [view.job.data.tokenizer for view in server.jobs.values()] == ["bytes", str(file)]
    file.write_text('{"model": {"vocab": {"a": 512}}}')
    done = run(server, "submit", job_file)
    assert done.status == 2
    assert "has 513 tokens, the model only 512" in done.err
    assert len(server.jobs) == 2


def test_ctrl_c_while_watching_what_was_submitted_says_that_the_job_goes_on(job_file: Path) -> None:
    """Exit 130; the job is not cancelled, and the output says how to do that."""
    server = FakeServer()

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    done = run(server, "submit", job_file, "--watch", sleep=interrupt)
    assert done.status == 130
    assert done.err == "job j-0000 continues; `isthmus cancel j-0000` stops it\n"
    assert not any(path.endswith("/cancel") for path in server.seen)


def test_submit_with_one_key_twice_is_one_job(job_file: Path) -> None:
    """`--key` makes a repetition harmless; without it two submissions are two jobs."""
    server = FakeServer()
    ids = [run(server, "submit", job_file, "--key", "k", "--json").json["id"] for _ in range(2)]
    assert ids[0] == ids[1]
    assert run(server, "submit", job_file, "--json").json["id"] != ids[0]


def test_submit_survives_a_server_that_restarts(job_file: Path) -> None:
    """A refused connection is tried again."""
    assert run(FakeServer(outages=2), "submit", job_file).status == 0


@pytest.mark.parametrize(
    ("text", "status", "word"),
    [("name: x\n", 2, "missing"), ("naem: x\n", 2, "name"), (": [", 2, "job.yaml")],
)
def test_a_bad_job_file_is_named_with_its_mistake(job_file: Path, text: str, status: int, word: str) -> None:
    """The error is the user's (exit 2), names the file, and nothing is sent."""
    job_file.write_text(text)
    server = FakeServer()
    done = run(server, "submit", job_file)
    assert (done.status, done.out) == (status, "")
    assert "job.yaml" in done.err
    assert word in done.err
    assert server.seen == []


def test_a_model_that_cannot_be_trained_is_refused_before_it_is_sent(job_file: Path) -> None:
    """An unknown architecture is answered with those that train."""
    (job_file.parent / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["NoSuchModel"]}))
    done = run(FakeServer(), "submit", job_file)
    assert done.status == 2
    assert "LlamaForCausalLM" in done.err


def test_plans_shows_candidates_and_refusals() -> None:
    """Each candidate with its figures; each refusal with its reason."""
    server = FakeServer()
    server.add(state="choosing", plan=None)
    done = run(server, "plans", "j-3f")
    assert done.status == 0
    for word in ("p1", "p2", "qingyang 0-2 > hangzhou 3-5 > nanjing 6-7", "620.0 ms", "1,652", "0.0135"):
        assert word in done.out
    assert "needs 93.1 MiB" in done.out
    assert "isthmus choose j-3f9a2c p1" in done.out
    assert PlanSet.model_validate(run(server, "plans", "j-3f", "--json").json).plans[0] == make_plan()


def test_plans_waits_for_the_planner() -> None:
    """While the job is being planned the command asks again; at the deadline it says so (exit 6)."""
    server = FakeServer()
    server.add(state="planning", plan=None, plans=None)

    def planned(_: float) -> None:
        server.add(state="choosing", plan=None)

    assert "p2" in run(server, "plans", "stdlib-moe", sleep=planned).out
    server.add(state="planning", plan=None, plans=None)
    assert run(server, "plans", "stdlib-moe", "--wait-s", "2").status == 6


def test_preempt_names_the_victims_and_takes_their_place_only_when_told() -> None:
    """Without --yes nothing changes; where there is no offer, that is a conflict that says where to look."""
    server = FakeServer()
    victim = VictimView(cluster="a", owner="o", job="slow", attempt=2, chips={"h20": 8}, unsaved_s=90)
    view = server.add(state="blocked", offer=(victim,))
    shown = run(server, "preempt", view.name)
    assert "slow" in shown.out
    assert f"isthmus preempt {view.id} --yes" in shown.out
    assert server.jobs[view.id].state == "blocked"
    assert run(server, "preempt", view.name, "--yes").status == 0
    assert server.jobs[view.id].state == "preempting"
    assert run(server, "preempt", view.name).status == 6


def test_choose_cancel_and_delete_change_the_job() -> None:
    """The verbs reach the job that the word means, and refusals keep their exit status."""
    server = FakeServer()
    view = server.add(state="choosing", plan=None)
    assert run(server, "choose", view.name, "nope").status == 5
    assert run(server, "choose", view.name, "p2").status == 0
    assert server.jobs[view.id].plan == make_plan("p2").model_copy(update={"why": "slower: more hops on the slow link"})
    assert run(server, "delete", view.id).status == 6
    assert JobView.model_validate(run(server, "cancel", view.id, "--json").json).state == "stopping"
    server.add(state="cancelled")
    assert run(server, "delete", view.id, "--json").json == {"deleted": view.id}
    assert server.jobs == {}


def test_jobs_lists_the_latest_first() -> None:
    """With no job it says how to submit one."""
    server = FakeServer()
    assert "isthmus submit" in run(server, "jobs").out
    server.add(id="j-old", name="old", submitted_s=START_S - 500)
    server.add(id="j-new", name="new", submitted_s=START_S - 5)
    out = run(server, "jobs").out
    assert out.index("j-new") < out.index("j-old")
    listed = TypeAdapter(list[JobView]).validate_python(run(server, "jobs", "--json").json)
    assert [view.id for view in listed] == ["j-new", "j-old"], "the order of the table"


def test_jobs_are_filtered_by_the_server() -> None:
    """State, name, user, time and number are part of the request; a wrong value is the user's mistake."""
    server = FakeServer()
    for number, state in enumerate(("running", "failed", "waiting", "failed")):
        server.add(
            id=f"j-{number}", name="odd" if number % 2 else "even", state=state, submitted_s=START_S - 3600 * number
        )

    def ids(*options: str) -> list[str]:
        return [view["id"] for view in run(server, "jobs", "--json", *options).json]

    assert ids() == ["j-0", "j-1", "j-2", "j-3"]
    assert ids("--state", "failed") == ["j-1", "j-3"]
    assert ids("--state", "failed", "--state", "waiting", "--limit", "2") == ["j-1", "j-2"]
    assert ids("--name", "even", "--since", "90m") == ["j-0"]
    assert ids("--user", "somebody") == []
    assert "No job matches" in run(server, "jobs", "--user", "bo").out
    for wrong in (["--state", "runing"], ["--since", "soon"], ["--name", "a b"], ["--limit", "0"]):
        assert run(server, "jobs", *wrong).status == 2


@pytest.mark.parametrize(
    ("text", "time_s"),
    [("90s", 910), ("2m", 880), ("0.1h", 640), ("9d", 0), ("1970-01-01T00:01", 60), ("1970-01-01T01:00+01:00", 0)],
)
def test_a_period_is_an_age_or_a_date(text: str, time_s: float) -> None:
    """Ages count back from now; dates without a zone are UTC; nothing is before the epoch."""
    assert parse_since_s(text, 1000) == time_s


@pytest.mark.parametrize("text", ["", "-5m", "5 m", "9" * 400 + "d", "1e9s", "now", "²h"])
def test_a_malformed_period_is_refused(text: str) -> None:
    """Whatever it is, the error names it and shows what is valid."""
    with pytest.raises(InputError, match="neither an age nor a date"):
        parse_since_s(text, 1000)


def test_pool_says_what_a_restored_server_does_not_know() -> None:
    """Sites that have not reported, and running parts without a job in the log, each with the command that ends it."""
    server = FakeServer()
    first, *others = server.pool.clusters
    part = UnknownPart(job="lost-1", attempt=2)
    server.pool = server.pool.model_copy(
        update={"clusters": (first.model_copy(update={"unknown_parts": (part,), "awaited": True}), *others)}
    )
    out = " ".join(run(server, "pool").out.split())
    assert f"its jobs wait until these sites report: {first.cluster.name}" in out
    assert "runs lost-1, attempt 2, which is not in the server's log" in out
    assert "`isthmus cancel lost-1`, for an unknown job with --unknown, ends it" in out


def test_cancel_ends_a_job_that_only_sites_know() -> None:
    """With --unknown the id goes to the server as it is; without it the job has to be known."""
    server = FakeServer()
    assert run(server, "cancel", "lost-1").status == 5
    assert "releases it" in run(server, "cancel", "lost-1", "--unknown").out
    assert server.ended_unknown == ["lost-1"]


def test_pool_shows_chips_connection_and_links() -> None:
    """A cluster whose agent is silent shows as disconnected; virtual chips say so."""
    out = run(FakeServer(), "pool").out
    assert "1/2 H20 (virtual)" in out
    assert "disconnected" in out
    assert "hangzhou > nanjing" in out
    PoolView.model_validate(run(FakeServer(), "pool", "--json").json)


def test_sites_show_their_agents_and_when_those_of_a_lost_site_end() -> None:
    """The list has the identity, the sessions and the lease; a lost site says when its parts count as ended."""
    out = run(FakeServer(), "site", "list").out
    assert "0123456789ab" in out
    shown = run(FakeServer(), "site", "show", "nanjing").out
    assert "its parts count as ended in" in shown
    assert "job-1" in shown
    assert "end themselves after 15 min" in run(FakeServer(), "site", "show", "hangzhou").out
    assert run(FakeServer(), "site", "show", "unheard").status == 5
    ClusterView.model_validate(run(FakeServer(), "site", "show", "nanjing", "--json").json)


def test_a_site_is_declared_gone_only_by_a_person_who_knows_what_it_risks() -> None:
    """Without --yes the command names the jobs and the risk, and asks the server for nothing."""
    done = run(FakeServer(), "site", "gone", "nanjing")
    assert done.status == 2
    assert "two attempts of job-1 train at once and overwrite each other's files" in done.err
    assert "released there: job-1" in run(FakeServer(), "site", "gone", "nanjing", "--yes").out
    assert "takes the place" in run(FakeServer(), "site", "enrol", "nanjing").out


def test_a_token_is_printed_alone() -> None:
    """So that it can be redirected into a file; a token has exactly one role."""
    assert run(FakeServer(), "token", "create", "--user", "bo").out == "isth_secret\n"
    made = TokenView.model_validate(run(FakeServer(), "token", "create", "--admin", "eve", "--json").json)
    assert (made.role, made.name) == ("admin", "eve")
    assert run(FakeServer(), "token", "create").status == 2
    assert run(FakeServer(), "token", "create", "--user", "a", "--owner", "b").status == 2
    assert run(FakeServer(), "token", "create", "--user", "a b").status == 2


def test_report_and_trace_write_files(tmp_path: Path) -> None:
    """Both read all pages of the metrics, and say where they wrote."""
    server = FakeServer()
    view = server.add(state="succeeded")
    server.metrics[view.id] = make_metrics()
    page, trace = tmp_path / "r.html", tmp_path / "t.json"
    assert run(server, "report", view.id, "-o", page, "--json").json["report"] == str(page)
    assert "of 40," in page.read_text()
    assert "40" in page.read_text()
    assert run(server, "trace", view.id, "-o", trace).status == 0
    assert json.loads(trace.read_text())["traceEvents"]
    done = run(server, "report", view.id, "-o", tmp_path / "r.html" / "x.html")
    assert (done.status, done.out) == (8, "")


def test_a_trace_needs_a_plan(tmp_path: Path) -> None:
    """Before a plan is chosen there is nothing to trace."""
    server = FakeServer()
    server.add(state="choosing", plan=None)
    assert run(server, "trace", "j-3", "-o", tmp_path / "t.json").status == 6


@pytest.mark.parametrize("kind", sorted(FILE_KINDS))
def test_schema_describes_the_fields_of_the_file(kind: str) -> None:
    """The schema of each file form names all its fields, as JSON in both forms of output."""
    pretty, line = run(None, "schema", kind), run(None, "schema", kind, "--json")
    assert json.loads(pretty.out) == line.json
    assert set(line.json["properties"]) - {"equal_replicas", "equal_stages"} == {
        field.alias or name for name, field in FILE_KINDS[kind].model_fields.items()
    }
    assert run(None, "schema", "nonsense").status == 2


def test_check_finds_out_what_a_file_is(job_file: Path, tmp_path: Path) -> None:
    """A field that only one of them has distinguishes a job, a pool and a plan."""
    plan, pool, other = tmp_path / "plan.yaml", tmp_path / "pool.yaml", tmp_path / "other.yaml"
    plan.write_text(make_plan().model_dump_json())
    pool.write_text("clusters: [{name: a, owner: o, node_groups: [{chip: H20, nodes: 1, chips_per_node: 8}]}]\n")
    other.write_text("x: 1\n")
    kinds = [run(None, "check", file, "--json").json["kind"] for file in (job_file, plan, pool)]
    assert kinds == ["job", "plan", "pool"]
    assert "a valid pool (clusters 1, chips 8, links 0)" in run(None, "check", pool).out
    assert run(None, "check", other).status == 2
    assert run(None, "check", pool, "--kind", "job").status == 2
    pool.write_text(pool.read_text().replace("H20", "H2O"))
    mistake = run(None, "check", pool, "--json")
    assert mistake.status == 2
    assert (mistake.json["error"], mistake.json["line"], mistake.json["value"]) == ("FileError", 1, "H2O")


def test_chips_names_the_source_of_each_line() -> None:
    """The catalogue is shown whole, as a table and as JSON."""
    out = run(None, "chips").out
    assert all(chip.name in out for chip in chip_catalogue().values())
    assert set(run(None, "chips", "--json").json) == set(chip_catalogue())


def test_errors_are_one_line_of_json_where_json_is_asked_for() -> None:
    """A refusal, a missing server and a wrong use alike; standard error stays empty."""
    for server, words, error in (
        (FakeServer(), ("watch", "nope"), "NotFoundError"),
        (FakeServer(outages=99), ("jobs",), "UnavailableError"),
        (FakeServer(protocol=5), ("jobs",), "ProtocolError"),
        (FakeServer(), ("choose",), "InputError"),
        (FakeServer(), ("no-such-command",), "InputError"),
    ):
        done = run(server, *words, "--json")
        assert done.json["error"] == error
        assert set(done.json) >= {"message", "hint"}
        assert done.err == ""
        assert done.status != 0


def test_errors_for_people_have_a_message_and_a_hint() -> None:
    """They go to standard error; standard output stays clean for pipes."""
    done = run(FakeServer(), "cancel", "nope")
    assert (done.status, done.out) == (5, "")
    assert done.err == "error: no job 'nope'\nhint:  `isthmus jobs` lists your jobs\n"


def test_markup_in_names_is_shown_as_it_is() -> None:
    """A reason with square brackets is text, not a style."""
    server = FakeServer()
    server.add(state="failed", reason="[red]exit[/red] [/]")
    assert "[red]exit[/red] [/]" in run(server, "jobs").out


JOBS = [
    make_view(id="j-aa1", name="j-b", submitted_s=1.0),
    make_view(id="j-aa2", name="twice", submitted_s=2.0),
    make_view(id="j-b", name="twice", submitted_s=3.0),
]


class TestPick:
    """Which job a word means."""

    def test_an_id_comes_before_a_name(self) -> None:
        """`j-b` is an id and another job's name: the id wins."""
        assert select_job(JOBS, "j-b").id == "j-b"

    def test_a_name_means_its_latest_job(self) -> None:
        """Two jobs are called `twice`."""
        assert select_job(JOBS, "twice").id == "j-b"

    def test_a_unique_beginning_of_an_id_is_enough(self) -> None:
        """But not one that two ids share, and never the empty word."""
        assert select_job(JOBS, "j-aa2"[:5]).id == "j-aa2"
        with pytest.raises(InputError, match="2 job ids: j-aa1, j-aa2"):
            select_job(JOBS, "j-a")
        for word in ("", "k"):
            with pytest.raises(NotFoundError):
                select_job(JOBS, word)


def test_tokens_are_listed_revoked_and_rotated_by_their_ids() -> None:
    """A list shows ids, never tokens; a rotation prints the new token alone; periods have a number and a unit."""
    token = "t-0123456789ab"
    listed = run(FakeServer(), "token", "list").out
    assert token in listed
    assert "when revoked" in listed
    assert "eve" in listed
    assert "revoked" in run(FakeServer(), "token", "revoke", token).out
    assert run(FakeServer(), "token", "rotate", token).out == "isth_after_3600\n"
    assert run(FakeServer(), "token", "rotate", token, "--grace", "10m").out == "isth_after_600\n"
    for bad in (("rotate", token, "--grace", "31d"), ("rotate", token, "--grace", "soon")):
        assert run(FakeServer(), "token", *bad).status == 2
    for bad_age in ("0s", "20000w", "soon", "-1d"):
        assert run(FakeServer(), "token", "create", "--user", "bo", "--expires", bad_age).status == 2
    assert run(FakeServer(), "token", "create", "--user", "bo", "--expires", "90d").out == "isth_secret\n"


def test_the_audit_log_is_printed_with_its_filters() -> None:
    """Who did what; `--since` and `--user` reach the server."""
    assert "user bo" in run(FakeServer(), "audit").out
    (record,) = run(FakeServer(), "audit", "--user", "ann", "--json").json
    assert (record["actor"], record["action"], record["number"]) == ("ann", "refused", 7)
    assert run(FakeServer(), "audit", "--since", "2020-01-01", "--json").json == []
    assert run(FakeServer(), "audit", "--since", "soon").status == 2
