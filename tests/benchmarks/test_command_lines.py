"""Rules of the benchmarks' command lines: a request for help or a mistyped option starts nothing."""

import importlib
import sys

import pytest

import benchmarks.__main__ as command
from benchmarks.table import Row


class Measured(list):
    """What was to be run, instead of running it."""

    def measure(self, chosen, options, *, keep):
        self.append((chosen, options, keep))
        return 0


@pytest.fixture
def measured():
    return Measured()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("option", "status", "stream"), [("--help", 0, 0), ("--no-such-option", 2, 1)])
@pytest.mark.parametrize("name", command.names())
def test_help_and_a_mistyped_option_run_no_benchmark(name, option, status, stream, monkeypatch, capsys):
    """Each lists its options instead: on standard output when asked, as an error when it was mistyped."""
    monkeypatch.setattr("sys.argv", [name, option])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main()
    assert ended.value.code == status
    assert capsys.readouterr()[stream].startswith("usage:")


@pytest.mark.parametrize("words", [["--help"], ["--list"], ["--quik"], ["no_such"], ["faults", "--help"]])
def test_what_names_no_benchmark_starts_none(words, measured, capsys):
    """Help, the list, an option that is not for all, an unknown name."""
    try:
        status = command.main(words, measured.measure)
    except SystemExit as ended:
        status = ended.code
    assert status == (0 if {"--help", "--list"} & set(words) else 2)
    assert not measured


@pytest.mark.parametrize(
    ("words", "options", "keep"),
    [
        (["faults"], [], True),
        (["--quick", "faults"], ["--quick"], False),
        (["faults", "--runs", "3"], ["--runs", "3"], True),
        (["faults", "--only", "1", "2", "--quick"], ["--quick", "--only", "1", "2"], False),
    ],
)
def test_options_behind_a_name_are_passed_on(words, options, keep, measured):
    """And the page is written by whole runs alone."""
    command.main(words, measured.measure)
    assert measured == [(["faults"], options, keep)]


def test_no_name_means_all(measured):
    """In alphabetical order."""
    command.main([], measured.measure)
    assert measured == [(command.names(), [], True)]


SCRIPT = """
import json, sys
for met in {met}:
    print(json.dumps(dict(what="x", ours=1.0, unit="s", target="t", met=met)))
sys.exit({status})
"""


@pytest.mark.parametrize(
    ("met", "status", "ended"),
    [([True], 0, True), ([True, False], 1, True), ([True], 1, False), ([], 1, False), ([False], 2, False)],
)
def test_a_missed_target_is_no_failure(met, status, ended):
    """Rows of a benchmark that missed a target are kept; without such a row, status 1 means that it failed."""
    rows, found = command.run_command([sys.executable, "-c", SCRIPT.format(met=met, status=status)])
    assert [row.met for row in rows] == met
    assert found is ended


def test_one_failed_benchmark_does_not_stop_the_others(capsys):
    """Its name is printed as an error, the tables of the others as ever, and the exit status is 1."""
    row = Row(what="y", ours=1.0, unit="s", met=True)

    def run(name, _):
        return ([], False) if name == "demo" else ([row], True)

    assert command.measure(["demo", "faults"], [], keep=False, run=run) == 1
    printed = capsys.readouterr()
    assert "| y |" in printed.out
    assert "benchmarks.demo failed" in printed.err
