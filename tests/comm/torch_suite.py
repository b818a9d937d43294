"""Ranks that run torch's tests of backends over isthmus: `python -m tests.comm.torch_suite FOLDER CLUSTERS`.

The tests are those of `torch.testing._internal.distributed.distributed_test`, which torch installs with itself and runs
for gloo, NCCL and MPI. Rank `r` is in cluster CLUSTERS[r]; the ranks are forks of this process, which has loaded the
tests. FOLDER has `names`, the tests to run in this order, in one process group; a rank writes a line of JSON a test to
`RANK.results`: name, outcome (passed, skipped, failed) and reason. It ends after the first failure.
"""

from __future__ import annotations

import json
import os
import sys
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.forks import run_ranks

BACKEND = "isthmus"


def set_environment(folder: Path, num_ranks: int) -> None:
    """Set what torch's module of tests reads when it is imported."""
    for name in ("test_dir", "init_dir", "barrier"):
        (folder / name).mkdir(exist_ok=True)
    os.environ |= {
        "BACKEND": BACKEND,
        "WORLD_SIZE": str(num_ranks),
        "TEMP_DIR": str(folder),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def torchs_tests() -> type:
    """Return the class of torch's tests; `set_environment` comes first."""
    from torch.testing._internal import common_distributed

    common_distributed.DistTestCases.backend_feature["ddp"].add(BACKEND)
    from torch.testing._internal.distributed import distributed_test

    found: type = vars(distributed_test.DistributedTest)["_DistTestBase"]
    return found


def run(tests: type, names: list[str], rank: int, folder: Path, clusters: str) -> None:
    """Run the tests `names` in the process group that this makes."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal import common_distributed
    from torch.testing._internal.common_utils import TestCase

    from isthmus.comm.group.create_group import IsthmusOptions, register_backend
    from tests.comm.torch_programs import meet

    class Ranked(TestCase, tests):
        """Torch's tests in a process that has its rank already, as under MPI."""

        world_size = len(clusters)

        def _barrier(self, *args: object, **kwargs: object) -> None:
            dist.barrier()

    Ranked.rank = rank
    torch.set_num_threads(1)
    register_backend()
    dist.init_process_group(
        BACKEND,
        store=dist.FileStore(str(folder / "store"), len(clusters)),
        rank=rank,
        world_size=len(clusters),
        timeout=timedelta(seconds=120),
        pg_options=IsthmusOptions(meet(rank, folder, clusters), tuple(clusters)),
    )
    exits = {one.exit_code: one.message for one in common_distributed.TEST_SKIPS.values()}
    with (folder / f"{rank}.results").open("a", encoding="utf-8") as results:
        for name in names:
            print(f"{name} ...", flush=True)
            is_known = hasattr(Ranked, name)
            outcome, why = _outcome(Ranked(name), exits) if is_known else ("skipped", "torch keeps it in a comment")
            results.write(json.dumps([name, outcome, why]) + "\n")
            results.flush()
            if outcome == "failed":
                os._exit(1)
            dist.barrier()
    dist.destroy_process_group()


class _Result(unittest.TestResult):
    """Knows how torch's decorators skip inside a rank: they end the process with a code."""

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802 - the name is unittest's
        if isinstance(err[1], SystemExit):
            self.exit_code = int(err[1].code or 0)
        else:
            super().addError(test, err)

    exit_code: int | None = None


def _outcome(test: unittest.TestCase, exits: dict[int, str]) -> tuple[str, str]:
    """Return how a test ended, and why, if it did not pass."""
    result = _Result()
    test.run(result)
    if result.exit_code is not None:
        return "skipped", exits.get(result.exit_code, f"exit {result.exit_code}")
    if result.skipped:
        return "skipped", result.skipped[0][1]
    failed = [*result.failures, *result.errors]
    return ("failed", failed[0][1]) if failed else ("passed", "")


def main() -> int:
    """Run all ranks; return how many failed."""
    folder, clusters = Path(sys.argv[1]), sys.argv[2]
    set_environment(folder, len(clusters))
    tests, names = torchs_tests(), (folder / "names").read_text(encoding="utf-8").split()

    def run_rank(rank: int) -> int:
        run(tests, names, rank, folder, clusters)
        return 0

    return run_ranks(len(clusters), run_rank)


if __name__ == "__main__":
    sys.exit(main())
