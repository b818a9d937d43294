"""Rules of the comparison of two builds: which figures are one, which build runs first, what a failure says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.compare_builds import Figures, Pair, compare, main, parse_rows, run_benchmark

OLD, NEW = Path("old"), Path("new")


def row(what: str, ours: float) -> str:
    """Return a row as a benchmark prints it with `--json`."""
    return json.dumps({"what": what, "ours": ours, "unit": "s"})


def test_figures_are_named_by_what_they_measure_without_what_a_run_measured() -> None:
    """A spread in brackets differs from run to run; two rows of one description stay two."""
    text = "\n".join(["a note", row("step (3 of 3 steps, 1.2 to 1.3 s)", 1.0), row("step (2 of 3)", 2.0), row("b", 3)])
    assert parse_rows(text) == {"step": (1.0, "s"), "step #2": (2.0, "s"), "b": (3.0, "s")}


def test_each_build_is_first_in_every_other_round_and_ratios_are_of_one_round() -> None:
    """A machine that gets slower from round to round changes no ratio."""
    order: list[Path] = []

    def run(checkout: Path, words: Sequence[str]) -> Figures:
        order.append(checkout)
        slower = 1 + (len(order) - 1) // 2
        return {"step": (slower * (2.0 if checkout == NEW else 1.0), "s"), f"of {checkout}": (1.0, "s")}

    pairs, unpaired = compare(OLD, NEW, ["x"], 3, run)
    assert order == [OLD, NEW, NEW, OLD, OLD, NEW]
    assert pairs == [Pair("step", "s", (1.0, 2.0, 3.0), (2.0, 4.0, 6.0))]
    assert pairs[0].as_line() == "| step | 2 | 4 | s | 2.000 (2.000 to 2.000) |"
    assert unpaired == ["of new", "of old"]


def test_an_interrupted_comparison_has_its_whole_rounds() -> None:
    """Ctrl-C in the second round: the figures are those of the first, of both builds."""
    values = iter([1.0, 2.0, 4.0])

    def run(_checkout: Path, _words: Sequence[str]) -> Figures:
        try:
            return {"step": (next(values), "s")}
        except StopIteration:
            raise KeyboardInterrupt from None

    assert compare(OLD, NEW, ["x"], 3, run) == ([Pair("step", "s", (1.0,), (2.0,))], [])


def test_a_build_runs_its_own_sources(tmp_path: Path) -> None:
    """Each checkout's benchmark imports that checkout's package, and gets the options."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "own_word.py").write_text("VALUE = 7.5\n")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "short.py").write_text(
        "import json, sys, own_word\n"
        "print(json.dumps({'what': ' '.join(sys.argv[1:]), 'ours': own_word.VALUE, 'unit': 's'}))\n"
        "sys.exit(1)\n"
    )
    assert run_benchmark(tmp_path, ["short", "distance"]) == {"--json distance": (7.5, "s")}


def test_a_benchmark_without_figures_ends_the_comparison_with_its_error(tmp_path: Path) -> None:
    """The last words of the failed benchmark are the message."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "short.py").write_text("raise SystemExit('no such part')\n")
    with pytest.raises(SystemExit, match="no such part"):
        run_benchmark(tmp_path, ["short"])


@pytest.mark.parametrize(
    ("words", "said"), [(["wan_pipeline"], "has no benchmarks/wan_pipeline.py"), (["x", "--rounds", "0"], "at least 1")]
)
def test_a_command_that_cannot_be_run_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the checkout or the value."""
    with pytest.raises(SystemExit):
        main([str(tmp_path), *words])
    assert said in capsys.readouterr().err
