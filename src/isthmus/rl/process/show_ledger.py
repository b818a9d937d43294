"""`python -m isthmus.rl.process.show_ledger FOLDER [STEP | prompt NUMBER]`: a run's ledger as JSON.

Without more the counts of the ledger, with a step what audits found of its samples, with a prompt the lives of its
samples.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from isthmus.core.errors import InputError, IsthmusError
from isthmus.rl.process.policy_method import LEDGER_FOLDER
from isthmus.rl.rollout.read_ledger import read_audits, read_ledger, read_sample_lives


def main(arguments: list[str]) -> int:
    """Print what is asked of the ledger below a folder of checkpoints; return 0 or the error's exit code."""
    try:
        numbers = arguments[2:] if arguments[1:2] == ["prompt"] else arguments[1:]
        if not arguments or len(numbers) > 1 or not all(one.isdecimal() for one in numbers):
            hint = "python -m isthmus.rl.process.show_ledger FOLDER [STEP | prompt NUMBER]"
            raise InputError("a folder and at most a step or a prompt are needed", hint=hint)
        folder = Path(arguments[0]) / LEDGER_FOLDER
        if arguments[1:2] == ["prompt"]:
            found = read_sample_lives(folder, int(*numbers or "0"))
        else:
            found = read_audits(folder, int(numbers[0])) if numbers else asdict(read_ledger(folder))
        print(json.dumps(found))
    except IsthmusError as error:
        print(json.dumps({"error": error.message, "hint": error.hint}))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
