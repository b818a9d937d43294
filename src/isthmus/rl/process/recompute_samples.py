"""`python -m isthmus.rl.process.recompute_samples STEP [MOST] < JOB`: a step's audits, and its samples recomputed.

The job is JSON, with the folders of its run. It prints what audits found while the job ran, and as `after_run` what
recomputing from its checkpoints finds now.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from isthmus.core.bounded_file import MAX_FILE_BYTES
from isthmus.core.errors import InputError, IsthmusError, NotFoundError
from isthmus.core.job import Job
from isthmus.rl.audit.audit_step import audit_step
from isthmus.rl.process.policy_method import LEDGER_FOLDER
from isthmus.rl.rollout.read_ledger import read_audits


def recompute_samples(job: Job, step: int, most: int | None = None) -> dict[str, Any]:
    """Return what `read_audits` does, with `after_run` and its differing samples beside those found before.

    Raises `NotFoundError` for a step without a batch.
    """
    folder = Path(job.checkpoints.folder) / LEDGER_FOLDER
    found = read_audits(folder, step)
    try:
        after = audit_step(job, folder, step, most)
    except NotFoundError as error:
        reason = f"{error.message}: none claims only versions that a checkpoint has; {error.hint}"
        count = found["samples"]
        after = {
            "samples": count, "recomputed": 0, "differing": [], "owners": {},
            "not_recomputed": [{"reason": reason, "samples": count}],
        }  # fmt: skip
    known = [one["sample"] for one in found["differing"]]
    new = [one for one in after["differing"] if one["sample"] not in known]
    return found | {"differing": [*found["differing"], *new], "after_run": after}


def main(arguments: list[str]) -> int:
    """Print what is found for the job on the standard input; return 0 or the error's exit code."""
    try:
        if len(arguments) not in (1, 2) or not all(one.isdecimal() for one in arguments):
            hint = "python -m isthmus.rl.process.recompute_samples STEP [MOST] < job.json"
            raise InputError("a step is needed, and at most a number of samples", hint=hint)
        text = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        try:
            job = Job.model_validate_json(text[:MAX_FILE_BYTES])
        except ValidationError as error:
            raise InputError(f"the standard input is no job: {error.errors()[0]['msg']}", hint="give JSON") from error
        print(json.dumps(recompute_samples(job, *map(int, arguments))))
    except IsthmusError as error:
        print(json.dumps({"error": error.message, "hint": error.hint}))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
