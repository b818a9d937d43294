"""The script that `isthmus render` writes for a local site starts a worker as its agent does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.agent.adapters.local_adapter import LocalAdapter
from isthmus.agent.adapters.render_local import render_local
from isthmus.agent.adapters.rendered_hold import CARDS, HOLD_ID, WORKER_FOLDER, PartRequest
from isthmus.agent.adapters.scheduler_adapter import HoldRequest, RankNeed, RankStart
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerLimits
from tests.agent.test_local import SITE, until

VARIABLES = {"NCCL_DEBUG": "INFO", "ODD": "a 'b' $c"}
NAMES = (*VARIABLES, "ISTHMUS_CARDS", "TMPDIR", "OMP_NUM_THREADS")
SAVE = (
    f"import json, os, sys; open(sys.argv[1] + '/seen', 'w').write(json.dumps([os.environ.get(n) for n in {NAMES!r}]))"
)
PROGRAM = (sys.executable, "-c", SAVE)


@pytest.mark.slow
def test_the_rendered_script_starts_what_the_agent_starts(tmp_path: Path) -> None:
    """With the same variables, under the same limits, once, and with its status recorded."""
    folders = [tmp_path / name for name in ("agent", "script")]
    for folder in folders:
        (folder / "tmp").mkdir(parents=True)
        WorkerFolder(folder).limits_path.write_text(WorkerLimits().model_dump_json())
    start = RankStart(folder=folders[0], cards=("h20/0/1",), command=(*PROGRAM, str(folders[0])), variables=VARIABLES)
    adapter = LocalAdapter(SITE, tmp_path / "queue")
    adapter.start(start)
    until(lambda: adapter.poll(folders[0]).state == "exited")

    shown = RankStart(
        folder=Path(WORKER_FOLDER), cards=(CARDS,), command=(*PROGRAM, WORKER_FOLDER), variables=VARIABLES
    )  # fmt: skip
    request = HoldRequest(
        id=HOLD_ID, job="a", attempt=1, ranks=(RankNeed(node_group="h20", num_cards=1),), lease_s=0.0
    )  # fmt: skip
    text = render_local(SITE, PartRequest(request=request, ranks=(0,), starts=(shown,))).text
    known = {WORKER_FOLDER: str(folders[1]), "{python}": sys.executable, CARDS: "h20/0/1"}
    for stand_in, value in known.items():
        text = text.replace(stand_in, value)
    subprocess.run(["sh", "-c", text], check=True, env={"PATH": os.environ["PATH"]})
    ours, theirs = (json.loads((folder / "seen").read_text()) for folder in folders)
    assert ours == [one.replace(str(folders[1]), str(folders[0])) for one in theirs]
    assert WorkerFolder(folders[1]).read_exit() == 0
