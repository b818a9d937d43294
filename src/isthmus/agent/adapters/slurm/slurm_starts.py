"""What the agent runs for a hold and for a rank at Slurm, as data: the adapter starts it, `isthmus render` shows it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from isthmus.agent.adapters.slurm.slurm_holds import RUNNER, SlurmHold
from isthmus.agent.adapters.slurm.slurm_site import SlurmSite

IMMEDIATE_S = 2
"""How long `salloc` waits for free cards."""

_NO_OUTPUT = "none"

KEEP = """
said=$1 hold=$2 name=$3; shift 3
salloc --no-shell --job-name="$name" "$@" 2>"$said"; status=$?
echo "status $status" >>"$said"
job=$(sed -n 's/.*Granted job allocation \\([0-9][0-9]*\\).*/\\1/p' "$said")
[ -n "$job" ] || exit 0
for try in $(seq 60); do
    srun --jobid="$job" --overlap --nodes=1 --ntasks=1 --gres=none --quiet --input=none --output=none --error=none \\
        --chdir=/ -- $RUNNER --watch "$hold" "$name" && exit 0
    [ -e "$hold/released" ] && exec scancel --name="$name"
    sleep 1
done
"""
"""Holds an allocation with `salloc --no-shell`, then starts the watcher of its lease inside it, if need be again.

It runs in a session of its own, so it outlives the agent: an allocation has its watcher also if the agent is killed
between the two."""

STEP = """
ended=$1; shift
"$@"; echo $? >"$ended.part" && mv -f "$ended.part" "$ended"
"""
"""Runs `srun` and leaves its status in a file of this start: the step has ended, whatever became of `exit`."""


def keeper_arguments(
    site: SlurmSite,
    folder: SlurmHold,
    number: int,
    unit: tuple[str, int, list[int]],
    *,
    preempts: bool,
    nodes: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the arguments of `KEEP` for the allocation `number` of a hold: node group, cards of a rank, its ranks.

    `nodes` are those that placement chose for all ranks of the hold. Without preemption `salloc` gives up soon.
    """
    group, num_cards, ranks = unit
    wait = () if preempts else (f"--immediate={IMMEDIATE_S}",)
    mark = (f"--comment=isthmus {folder.id}", "--dependency=singleton")
    chosen = [nodes[rank] for rank in ranks] if nodes else []
    asks = site.asks(group, num_cards, len(ranks), preempts=preempts, nodes=chosen)
    return (str(folder.said(number)), str(folder.path), folder.job_name(number), *wait, *mark, *asks)


def keeper_environment(variables: dict[str, str]) -> dict[str, str]:
    """Return the environment of `KEEP`."""
    return {**variables, "RUNNER": " ".join(RUNNER), "PATH": variables.get("PATH", os.defpath)}


def step_arguments(
    folder: Path,
    hold: SlurmHold,
    *,
    job: str,
    node: str,
    other_nodes: Sequence[str] = (),
    asks: Sequence[str],
    places: str,
    start: str,
    program: Sequence[str],
) -> tuple[str, ...]:
    """Return the arguments of `STEP` for the worker of `folder`.

    It runs on `node`, in Slurm's job `job`, on the cards at `places` of those that the step gets there: by `asks` all
    of the job's cards on the node. The job's `other_nodes` are excluded: with the node list alone Slurm refuses more
    cards than the job has on its first node. `start` names this try.
    """
    excluded = (f"--exclude={','.join(other_nodes)}",) if other_nodes else ()
    return (
        f"{folder}/step.{start}", "srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1",
        f"--nodelist={node}", *excluded, *asks, "--quiet", "--input=none", f"--output={_NO_OUTPUT}",
        "--kill-on-bad-exit=0", "--chdir=/", "--", *RUNNER, str(folder), str(hold.path), places, start, *program,
    )  # fmt: skip
