"""`isthmus strategies`: bytes by hand, seconds of the simulator, and named errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.strategies import STRATEGIES
from tests.cli.test_plan_commands import answer, run


def test_bytes_and_seconds_of_four_hosts_of_four_chips() -> None:
    """Per host, in units of the gradients: ring 1.875, torus 1.5, PASSING 1, SwitchML 4; 64 MiB at 10 Gbit/s."""
    told = answer("strategies")
    size = told["bytes"]
    assert size == 64 * 2**20
    assert told["strategies"].keys() == set(STRATEGIES)
    by_host = {name: one["sent_bytes_by_host"] for name, one in told["strategies"].items()}
    for name, times in {"ring": 1.875, "2d-torus": 1.5, "passing": 1, "switchml": 4, "parameter-server": 4}.items():
        assert by_host[name] == [pytest.approx(times * size)] * 4
    assert told["strategies"]["psring"]["received_bytes_by_aggregator"] == [pytest.approx(4 * size)]
    assert told["strategies"]["passing"]["seconds"] == pytest.approx(0.75 * size / 16e9 + size / 1.25e9)
    assert told["strategies"]["parameter-server"]["bound"] == "aggregator"


def test_options_change_what_they_name() -> None:
    """Two servers halve PSRing's time outside; a delay counts once per round."""
    one, two = (answer("strategies", "--aggregators", n)["strategies"]["psring"] for n in (1, 2))
    outside_s = 8 * 64 * 2**20 / 1.25e9
    assert one["seconds"] - two["seconds"] == pytest.approx(outside_s / 2)
    words = ("strategies", "--hosts", 2, "--chips", 1, "--bytes", "4KiB", "--network-gbps", 1, "--ring-gbps", 8)
    plain, late = answer(*words)["strategies"], answer(*words, "--delay-ms", 10)["strategies"]
    assert plain["ring"]["seconds"] == pytest.approx(4096 * 8 / 1e9)
    assert late["ring"]["seconds"] - plain["ring"]["seconds"] == pytest.approx(0.02)
    status, text = run("strategies", "--hosts", 2)
    assert status == 0
    assert "hierarchical-ring" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--hosts", 0), "hosts"),
        (("--hosts", 64, "--chips", 8), "at most 256"),
        (("--ring-gbps", 0), "rates must be above 0"),
        (("--network-gbps", "nan"), "rates must be above 0"),
        (("--bytes", "many"), "many"),
        (("--bytes", "-5"), "-5"),
    ],
)
def test_bad_options_are_named(words: tuple[object, ...], message: str) -> None:
    """Exit status 2, and the value."""
    status, text = run("strategies", *words)
    assert status == 2, text
    assert message in text


def test_the_guide_shows_what_the_command_prints() -> None:
    """Each table of docs/guide/strategies.md is the output of the command above it."""
    page = (Path(__file__).parents[2] / "docs/guide/strategies.md").read_text(encoding="utf-8")
    blocks = [block.split("```")[0].splitlines() for block in page.split("```console\n")[1:]]
    assert len(blocks) == 2
    for words, *shown in blocks:
        status, text = run(*words.removeprefix("$ isthmus ").split())
        assert status == 0
        assert [line.split() for line in text.splitlines()] == [line.split() for line in shown]
