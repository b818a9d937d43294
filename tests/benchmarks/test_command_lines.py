"""Rules of the benchmarks' command lines: whoever asks for help, or mistypes, starts nothing."""

import importlib

import pytest

import benchmarks.__main__ as command


@pytest.fixture
def measured(monkeypatch):
    """What was to be run, instead of running it."""
    started = []
    monkeypatch.setattr(command, "measure", lambda chosen, options, *, keep: started.append((chosen, options, keep)))
    return started


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("option", "status", "stream"), [("--help", 0, 0), ("--no-such-option", 2, 1)])
@pytest.mark.parametrize("name", command.names())
def test_help_and_a_mistyped_option_run_no_benchmark(name, option, status, stream, monkeypatch, capsys):
    """Each tells of its options instead: on standard output when asked, as an error when it was mistyped."""
    monkeypatch.setattr("sys.argv", [name, option])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main()
    assert ended.value.code == status
    assert capsys.readouterr()[stream].startswith("usage:")


@pytest.mark.parametrize("words", [["--help"], ["--list"], ["--quik"], ["no_such"], ["faults", "--help"]])
def test_what_names_no_benchmark_starts_none(words, measured, capsys):
    """Help, the list, an option that is not for all, an unknown name."""
    try:
        status = command.main(words)
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
    command.main(words)
    assert measured == [(["faults"], options, keep)]


def test_no_name_means_all(measured):
    """In the order of the page."""
    command.main([])
    assert measured == [(command.names(), [], True)]
