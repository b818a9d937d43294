"""`python -m isthmus.rl.process.show_ledger FOLDER`: the counts of a run's ledger as JSON, for the command line."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from isthmus.core.errors import InputError, IsthmusError
from isthmus.rl.process.policy_method import LEDGER_FOLDER
from isthmus.rl.rollout.read_ledger import read_ledger


def main(arguments: list[str]) -> int:
    """Print the counts of the ledger below a folder of checkpoints; return 0 or the error's exit code."""
    try:
        if len(arguments) != 1:
            raise InputError("one argument is needed", hint="python -m isthmus.rl.process.show_ledger FOLDER")
        print(json.dumps(asdict(read_ledger(Path(arguments[0]) / LEDGER_FOLDER))))
    except IsthmusError as error:
        print(json.dumps({"error": error.message, "hint": error.hint}))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
