"""`python -m isthmus.rl.process.rl_supervisor FOLDER`: the supervisor of a rank of a job with `task: rl`."""

from __future__ import annotations

import sys
from pathlib import Path

from isthmus.core.errors import InputError, IsthmusError
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec
from isthmus.rl.process.policy_method import PolicyMethod
from isthmus.rl.process.rollout_worker import run_rollout
from isthmus.train.process.supervisor import supervise
from isthmus.train.process.worker import RankResources, error_line, run_worker


def run_rl_rank(folder: WorkerFolder, spec: WorkerSpec, resources: RankResources) -> None:
    """Run a rank that trains, or one that decodes; raises `IsthmusError` on expected failures."""
    (run_rollout if spec.plan.is_rollout(spec.rank) else run_worker)(folder, spec, resources)


def main(arguments: list[str]) -> int:
    """Supervise the rank of the given folder; return its exit status."""
    try:
        if len(arguments) != 1:
            raise InputError("one argument is needed", hint="python -m isthmus.rl.process.rl_supervisor FOLDER")
        return supervise(WorkerFolder(Path(arguments[0])), PolicyMethod(), run_rl_rank)
    except IsthmusError as error:
        print(f"error: {error_line(error)}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
