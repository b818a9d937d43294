"""The guide for several machines, followed on machines made of network namespaces; then a closed port (root)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.follow_guide import blocks
from tests.docs.machine_guide import commands, needs_root, type_in
from tests.machines import Machine, machines, wait_until

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "several-machines.md"
LONG_RUNNING = ("isthmus serve", "isthmus agent")
STARTED = ("starting", "running", "stopping", "succeeded")


def test_the_guide_has_ten_commands_at_most() -> None:
    """From nothing to a job on three machines."""
    assert len(commands(PAGE)) <= 10
    assert {machine for machine, _, _ in commands(PAGE)} == {"all", "a", "b", "c"}


def write_files(folder: Path) -> None:
    """Write the files of the page, and a text of the reader's own."""
    for block in blocks(PAGE):
        if block.language == "yaml":
            (folder / block.text.partition("\n")[0].removeprefix("# ")).write_text(block.text)
        elif block.language == "json":
            (folder / "model").mkdir()
            (folder / "model" / "config.json").write_text(block.text)
    (folder / "text").mkdir()
    (folder / "text" / "own.txt").write_text("An isthmus joins two lands. " * 2000)


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Machine]]:
    """Three machines on which the guide has been followed to its end; its job has succeeded.

    `pip install` is followed by a test of its own: here the machines find the packages of this checkout.
    """
    folder = tmp_path_factory.mktemp("several") / "shared"
    folder.mkdir()
    write_files(folder)
    with machines("abc", folder) as found:
        for number, (name, command, shown) in enumerate(commands(PAGE)):
            if name != "all":
                log = folder / f"log-{number}-{name}"
                type_in(found[name], command, shown, log, goes_on=command.startswith(LONG_RUNNING))
        yield found


class TestGuide:
    """The page, then what it says about a closed port."""

    pytestmark = needs_root

    def test_every_command_works_as_printed(self, followed: dict[str, Machine]) -> None:
        """Three machines have trained one model: each had a part, and the result is a model."""
        (view,) = json.loads(followed["a"].run("isthmus jobs --json").stdout)
        assert view["state"] == "succeeded"
        assert sorted(part["cluster"] for part in view["parts"]) == ["a", "b", "c"]
        assert list((followed["a"].folder / "result").glob("*.safetensors"))
        assert "warning" not in "".join(log.read_text().lower() for log in followed["a"].folder.glob("log-*"))

    def test_a_closed_port_is_named_and_no_chip_is_held(self, followed: dict[str, Machine]) -> None:
        """The firewall of a drops the workers' ports: `show` says so; once they are open the job starts."""
        a = followed["a"]
        a.close_ports(41000, 41100)
        text = (a.folder / "job.yaml").read_text().replace("name: first", "name: second")
        text = text.replace("folder: checkpoints", "folder: second").replace("output: result", "output: result-2")
        (a.folder / "second.yaml").write_text(text)
        for name in "bc":
            restart_agent(name, followed[name])
        job = json.loads(a.run("isthmus submit second.yaml --token-file me.token --json").stdout)["id"]

        def job_view() -> dict[str, Any]:
            (found,) = (one for one in json.loads(a.run("isthmus jobs --json").stdout) if one["id"] == job)
            return found

        show = f"isthmus show {job} --token-file me.token"
        wait_until(lambda: "cannot reach site a" in a.run(show).stdout, "the reason is shown", 120)
        reason = job_view()["reason"]
        assert re.search(r"site [bc] cannot reach site a at 10\.0\.0\.1:41000-41100 \(timed out after 3 s\)", reason)
        assert "open these ports at a for" in reason
        pool = json.loads(a.run("isthmus pool --json").stdout)
        assert [list(one["free_chips"].values()) for one in pool["clusters"]] == [[1], [1], [1]]
        a.open_ports()
        wait_until(lambda: job_view()["state"] in STARTED, "the job starts", 120)


def restart_agent(name: str, machine: Machine) -> None:
    """Stop the machine's agent, and type its command again."""
    agent = machine.background.pop()
    agent.terminate()
    agent.wait(30)
    typed = {at: (command, shown) for at, command, shown in commands(PAGE) if command.startswith("isthmus agent")}
    type_in(machine, *typed[name], machine.folder / f"log-again-{name}", goes_on=True)
