"""Tables at 80, 100 and 120 columns: every value is there, and no column is narrower than its values need."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from isthmus.cli.terminal.folding_table import MAX_WORD_WIDTH, FoldingTable
from isthmus.core.plan import Plan
from isthmus.core.views.api_views import JobView
from tests.cli.fake_server import FakeServer, run
from tests.cli.samples import make_plan, make_view

pytestmark = pytest.mark.integration

WIDTHS = (80, 100, 120)
LONG = "no plan fits the free resources: needs 3 h20 at qingyang, 2 are free"


def rendered(table: FoldingTable, width: int) -> list[str]:
    console = Console(width=width, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get().splitlines()


def check_page(text: str, width: int, values: list[str]) -> None:
    """No line is wider than the terminal; every word of every value is whole; no column of single letters."""
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    words = {word.strip(":,;()") for word in " ".join(lines).split()}
    for value in values:
        assert {word.strip(":,;()") for word in value.split()} <= words, f"{value!r} is broken at {width} columns"


def long_view() -> JobView:
    view = make_view(id="j-0123456789abcdef", name="a-name-of-average-length", user="a-user-name", reason=LONG)
    return view.model_copy(update={"state": "waiting"})


def long_plan(ident: str) -> Plan:
    plan = make_plan(ident)
    assert plan.predicted is not None
    figures = {"mfu_fraction": 0.415, "currency": "EUR", "cost_per_iteration": 1234.5}
    return plan.model_copy(update={"predicted": plan.predicted.model_copy(update=figures), "zero": 1})


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("words", ["jobs", "plans", "pool", "show"])
def test_pages_of_the_server_keep_every_word(words: str, width: int) -> None:
    """`jobs`, `plans`, `pool` and `show` wrap between words and fold columns below their row, on a terminal."""
    server = FakeServer()
    view = long_view()
    assert view.plans is not None
    plans = view.plans.model_copy(update={"plans": (long_plan("plan-92f59d7e"), long_plan("plan-aa051998"))})
    server.jobs[view.id] = view = view.model_copy(update={"plans": plans})
    arguments = [words, *([view.id] if words in ("plans", "show") else [])]
    expected = {
        "jobs": [view.id, view.name, view.user, "waiting", LONG, "qingyang + hangzhou + nanjing"],
        "plans": ["plan-92f59d7e", "620.0 ms", "1,652", "41.5%", "38.1 MiB", "1234 EUR", "ZeRO", "4 x 1", "0.0135"],
        "pool": ["qingyang", "hangzhou", "disconnected", "1/2 H20 (virtual)", "10 ms", "best-effort", "0.0001"],
        "show": [view.id, "qingyang", "owner-a", "running"],
    }[words]
    done = run(server, *arguments, terminal=True, environ={"COLUMNS": str(width)})
    assert done.status == 0, done.err
    check_page(re.sub(r"\x1b\[[0-9;]*m", "", done.out), width, expected)


def write_files(folder: Path, nodes: int = 4) -> None:
    """Write a job of 7 billion parameters and a pool of two unlike clusters."""
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "job.yaml").write_text(
        "name: mine\nmodel: config.json\noutput: out\ndata: {paths: [text]}\ncheckpoints: {folder: ck}\n"
        "training: {steps: 100, sequence_length: 2048, global_batch_size: 8}\n"
    )
    groups = [
        f"{{chip: {chip}, nodes: {nodes}, chips_per_node: 1, price_per_chip_hour: 2}}" for chip in ("H20", "A100")
    ]
    (folder / "pool.yaml").write_text(
        "currency: EUR\nclusters:\n"
        f"  - {{name: a, owner: x, node_groups: [{groups[0]}]}}\n"
        f"  - {{name: b, owner: y, node_groups: [{groups[1]}]}}\n"
        "links:\n  - {between: [a, b], bandwidth_gbps: 10, round_trip_ms: 10}\n"
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_plan_and_explain_show_degrees_memory_utilisation_and_cost(tmp_path: Path, width: int) -> None:
    """tp, ep, ZeRO, micro-batches, memory with its share, MFU and cost with its currency, at every width."""
    write_files(tmp_path)
    pool = ["--pool", tmp_path / "pool.yaml"]
    where = {"terminal": True, "environ": {"COLUMNS": str(width)}}
    search = [*pool, "--top", "2", "--tp", "1", "--save", tmp_path / "plans"]
    done = run(FakeServer(), "plan", tmp_path / "job.yaml", *search, **where)
    (file, *_) = (tmp_path / "plans").iterdir()
    best = json.loads(file.read_text())
    figures = best["predicted"]
    cost = f"{figures['cost_per_iteration']:.4g} EUR"
    micro = f"{best['micro_batches']} x {best['micro_batch_size']}"
    values = [best["id"], f"{figures['mfu_fraction']:.1%}", cost, "tp", "ep", "ZeRO", micro, "MFU", best["schedule"]]
    page = re.sub(r"\x1b\[[0-9;]*m", "", done.out)
    check_page(page, width, values)
    assert re.search(r"\d GiB \(\d+%\)", page)
    done = run(FakeServer(), "explain", file, *pool, **where)
    page = re.sub(r"\x1b\[[0-9;]*m", "", done.out)
    check_page(page, width, ["tp", "ep", "ZeRO", "MFU", cost, "micro-batches", "1 A100"])


@given(
    rows=st.lists(st.lists(st.text("ab c", max_size=60), min_size=5, max_size=5), min_size=1, max_size=4),
    width=st.sampled_from((*WIDTHS, 30)),
)
def test_no_cell_is_lost_at_any_width(rows: list[list[str]], width: int) -> None:
    """Whatever the values: all their letters are printed, lines fit, and the shown columns keep their words whole."""
    columns = ["first", "second", "third", "fourth", "fifth"]
    table = FoldingTable("", columns, rows, "third")
    lines = rendered(table, width)
    assert max(map(len, lines)) <= width
    folded = len(table.column_widths(width))
    shown = sum(text.count("b") for row in rows for text in row)
    names = sum(name.count("b") for name in columns[folded:])
    assert shown <= sum(line.count("b") for line in lines) <= shown + names * len(rows)
    for index, least in enumerate(table.column_widths(width)):
        words = [word for row in rows for word in row[index].split()]
        assert least >= min(MAX_WORD_WIDTH, width, max(map(len, words), default=0))


def test_folded_text_is_not_cut_without_a_terminal() -> None:
    """In a pipe rich cuts lines at the width; folded cells wrap instead."""
    done = run_jobs(80)
    assert set(LONG.split()) <= set(done.split())


def run_jobs(width: int) -> str:
    server = FakeServer()
    view = long_view()
    server.jobs[view.id] = view
    return run(server, "jobs", environ={"COLUMNS": str(width)}).out


def test_a_pool_without_a_currency_says_what_cost_means() -> None:
    """The unit is that of the prices in the pool file; a pool without prices has no cost."""
    server = FakeServer()
    server.add(state="choosing", plan=None)
    assert "unit of price_per_chip_hour" in run(server, "plans", "j-3f").out
