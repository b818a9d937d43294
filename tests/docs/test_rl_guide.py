"""The guide on reinforcement learning, typed command by command: three owners train sums."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.follow_guide import ROOT, blocks
from tests.docs.terminal import Terminal
from tests.free_ports import free_ports

PAGE = ROOT / "docs" / "guide" / "rl.md"
LONG_S = 300.0
SHORT = {"steps: 30": "steps: 2", "evaluate_every: 10": "evaluate_every: 2"}
"""What `make test` types instead, where `--whole` trains as long as the page does."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def follow(folder: Path, changes: dict[str, str]) -> dict[str, str]:
    """Do what the page says in `desk` below `folder`; return what each command printed."""
    terminal, desk, printed = Terminal(folder, changes, LONG_S), folder / "desk", dict[str, str]()
    desk.mkdir()
    try:
        for block in blocks(PAGE):
            text = block.text
            for old, new in changes.items():
                text = text.replace(old, new)
            if block.language in ("yaml", "python"):
                (desk / text.partition("\n")[0].removeprefix("# ")).write_text(text)
            elif block.language == "json":
                (desk / "model").mkdir()
                (desk / "model" / "config.json").write_text(text)
            elif block.language == "console":
                for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                    command, _, output = part.partition("\n")
                    printed[command] = terminal.type_in("pool", command, output)
    finally:
        terminal.end()
    return printed


def test_every_command_works_as_printed(tmp_path: Path, whole: bool) -> None:
    """Rewards rise; the ledger has all samples, none lost or doubled, none too stale, and the bytes of each link."""
    port = str(free_ports(1)[0])
    changes = {"8470": port, "--pool pool.yaml\n": f"--pool pool.yaml --port {port}\n"} | ({} if whole else SHORT)
    printed = follow(tmp_path, changes)
    found: dict[str, Any] = json.loads(printed["isthmus rl ledger sums --json"])
    assert found["samples"]["trained"] == (30 if whole else 2) * 128
    assert max(map(int, found["staleness"])) <= 1
    rewards = [float(one) for one in re.findall(r"reward ([\d.]+)", printed["isthmus submit sums.yaml --watch"])]
    assert not whole or sum(rewards[-5:]) / 5 > rewards[0] + 0.1, rewards
    assert all(found["bytes"][name]["weights_bytes"] > 300_000 for name in "bc")
    assert found["barred"] == {}
    assert sum(one["samples"] for one in found["audits"].values()) > 0
