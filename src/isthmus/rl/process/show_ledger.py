"""`python -m isthmus.rl.process.show_ledger FOLDER [STEP]`: a run's ledger as JSON, for the command line.

Without a step the counts of the ledger, with one what audits found of its samples.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from isthmus.core.errors import InputError, IsthmusError
from isthmus.rl.process.policy_method import LEDGER_FOLDER
from isthmus.rl.rollout.read_ledger import read_audits, read_ledger


def main(arguments: list[str]) -> int:
    """Print what is asked of the ledger below a folder of checkpoints; return 0 or the error's exit code."""
    try:
        if len(arguments) not in (1, 2) or not all(one.isdecimal() for one in arguments[1:]):
            hint = "python -m isthmus.rl.process.show_ledger FOLDER [STEP]"
            raise InputError("a folder and at most a step are needed", hint=hint)
        folder = Path(arguments[0]) / LEDGER_FOLDER
        found = read_audits(folder, int(arguments[1])) if arguments[1:] else asdict(read_ledger(folder))
        print(json.dumps(found))
    except IsthmusError as error:
        print(json.dumps({"error": error.message, "hint": error.hint}))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
