"""What `isthmus render` shows of a Slurm site are the commands that the adapter runs; no Slurm is needed."""

from __future__ import annotations

import re
import shlex
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from isthmus.agent.adapters.rendered_hold import CARDS, HOLD_ID, WORKER_FOLDER, PartRequest
from isthmus.agent.adapters.scheduler_adapter import HoldRequest, RankNeed, RankStart
from isthmus.agent.adapters.slurm.render_slurm import render_slurm
from isthmus.agent.adapters.slurm.slurm_adapter import SlurmAdapter
from isthmus.agent.adapters.slurm.slurm_commands import SlurmCommands
from isthmus.agent.adapters.slurm.slurm_scripts import SlurmScripts
from isthmus.agent.adapters.slurm.slurm_site import SlurmSite
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerLimits, write_atomically
from isthmus.core.owner.site_file import NodeSelector, SiteFile
from isthmus.core.pool import Cluster, NodeGroup

SITE = SlurmSite(
    SiteFile(
        kind="slurm",
        node_groups={"h20": NodeSelector(partition="normal"), "a100": NodeSelector(partition="old", resource="gpu:a")},
        options={"account": "pool", "max_minutes": 60},
    ),
    Cluster(
        name="east", owner="o",
        node_groups=(
            NodeGroup(name="h20", chip="H20", nodes=2, chips_per_node=4),
            NodeGroup(name="a100", chip="A100", nodes=1, chips_per_node=8),
        ),
    ),
)  # fmt: skip
NEEDS = (RankNeed(node_group="h20", num_cards=2), RankNeed(node_group="a100", num_cards=1))
JOBS = {"7": " Nodes=a1 CPU_IDs=0 Mem=0 GRES=gpu:2(IDX:0-1)", "8": " Nodes=b1 CPU_IDs=0 Mem=0 GRES=gpu:a:1(IDX:3)"}


class GrantingCommands(SlurmCommands):
    """A Slurm that knows two allocations of one hold."""

    def run_fully(self, *command: str) -> tuple[str, str]:
        if command[0] == "scancel":
            return "", ""
        job = command[-1]
        return f"JobId={job} JobName=isthmus-{self.config}-{'78'.index(job)} x{JOBS[job]}", ""


class RecordingScripts(SlurmScripts):
    """Notes what would run; each `salloc` is granted at once."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[str, ...]] = []
        self.environments: list[Mapping[str, str]] = []

    def start(self, folder: Path, script: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        if "salloc" in script:
            write_atomically(Path(arguments[0]), f"Granted job allocation {7 + len(self.ran)}\nstatus 0\n")
        self.ran.append(tuple(arguments))
        self.environments.append(dict(environment))


def commands_of(script: str) -> list[list[str]]:
    """Return the arguments of each script within a rendered one."""
    lines = [line for line in script.splitlines() if not line.startswith("#")]
    words = [word for word in shlex.split("\n".join(lines)) if not re.match(r"[A-Z_]+=", word)]
    starts = [at for at, word in enumerate(words) if word == "sh" and words[at + 1] == "-c"]
    return [words[start + 4 : end] for start, end in zip(starts, [*starts[1:], len(words)], strict=True)]


def test_what_is_rendered_is_what_runs(tmp_path: Path) -> None:
    """The same allocations, and the same step of a rank, but for what is known at the start only."""
    request = HoldRequest(id=uuid.uuid4().hex, job="train", attempt=2, ranks=NEEDS, lease_s=60.0)
    scripts, commands = RecordingScripts(), GrantingCommands(config=request.id)
    adapter, ran = SlurmAdapter(SITE, tmp_path, commands, ("true",), scripts), scripts.ran
    cards = adapter.hold(request).cards
    assert cards == (("h20/a1/0", "h20/a1/1"), ("a100/b1/3",))
    folder = tmp_path / "rank-5"
    folder.mkdir()
    WorkerFolder(folder).limits_path.write_text(WorkerLimits().model_dump_json())
    start = RankStart(folder=folder, cards=cards[1], hold=request.id, variables={"NCCL_DEBUG": "INFO"})
    adapter.start(start)

    shown_start = replace(
        start, folder=Path(WORKER_FOLDER), cards=(CARDS,), command=("true", WORKER_FOLDER)
    )  # fmt: skip
    part = PartRequest(request=replace(request, id=HOLD_ID), ranks=(0, 5), starts=(shown_start, shown_start))
    text = render_slurm(SITE, part).text
    shown = commands_of(text)
    assert "export RUNNER=" in text
    assert scripts.environments[-1]["NCCL_DEBUG"] == "INFO"
    assert text.count("NCCL_DEBUG=INFO") == 2, "each rank has it"
    assert len(shown) == len(ran) + 1 == 4, "two allocations and two ranks, of which one was started"
    for ours, theirs in zip([*shown[:2], shown[3]], ran, strict=True):
        assert [_known_later(word, request.id, tmp_path, folder) for word in theirs] == ours


def _known_later(word: str, hold: str, state: Path, folder: Path) -> str:
    """Return a word of a real command with what is known at the start only as the rendered script shows it."""
    word = word.replace(hold, HOLD_ID).replace(str(folder), "{worker_folder}").replace(str(state), "{state}")
    word = re.sub(r"(step\.|^)[0-9a-f]{32}$", r"\g<1>{start}", word) if HOLD_ID not in word else word
    stand_ins = {"--jobid=8": "--jobid={job}", "--nodelist=b1": "--nodelist={node}", "0": "{places}"}
    stand_ins["--gres=gpu:a:1"] = "--gres=gpu:a:{cards_on_node}"
    return "{python}" if word == sys.executable else stand_ins.get(word, word)


def test_placement_by_topology_names_the_nodes() -> None:
    """`--nodelist` has each chosen node once; preempting allocations leave the choice to Slurm."""
    asks = SITE.asks("h20", 2, 3, preempts=False, nodes=["a1", "a1", "a2"])
    assert "--nodelist=a1,a2" in asks
    assert not any("nodelist" in one for one in SITE.asks("h20", 2, 3, preempts=False, nodes=["", ""]))
    assert not any("nodelist" in one for one in SITE.asks("h20", 2, 3, preempts=True, nodes=["a1", "a2", "a3"]))
