"""torch's own tests of backends pass over the group; each that is left out has its reason."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.forks import output_of

ROOT = Path(__file__).parents[2]
CLUSTERS = "aabb"
MORE_CLUSTERS, BY_MORE = "aaaabbbb", "passed by 8 ranks"
"""For the tests of groups of some ranks, which torch leaves out of fewer than 8 ranks."""

LIMIT_S = 1800
EXPECTED: dict[str, str] = json.loads((Path(__file__).parent / "torch_suite.json").read_text(encoding="utf-8"))
"""Each test of torch's module, and "passed" or the reason why it is left out: torch's own."""

SAMPLE = (
    "test_Backend_enum_class",
    "test_send_recv",
    "test_isend",
    "test_broadcast",
    "test_reduce_sum",
    "test_all_reduce_sum_async",
    "test_all_reduce_max",
    "test_scatter",
    "test_gather",
    "test_all_gather",
    "test_all_gather_coalesced_simple",
    "test_barrier",
)


def run_suite(names: Sequence[str], folder: Path, clusters: str = CLUSTERS) -> list[list[tuple[str, str, str]]]:
    """Return (name, outcome, reason) of each test at each rank."""
    (folder / "names").write_text("\n".join(names), encoding="utf-8")
    output_of([sys.executable, "-W", "ignore", "-m", "tests.comm.torch_suite", str(folder), clusters], ROOT, LIMIT_S)
    files = [folder / f"{rank}.results" for rank in range(len(clusters))]
    lines = [one.read_text(encoding="utf-8").splitlines() if one.exists() else [] for one in files]
    return [[tuple(json.loads(line)) for line in of] for of in lines]


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_torchs_own_tests_pass(whole: bool, tmp_path: Path) -> None:
    """A sample of them; with `--whole` all that are not left out, and torch leaves out what the list says."""
    if find_spec("expecttest") is None:
        pytest.skip("torch's tests import expecttest, which is not installed: pip install expecttest")
    names = [name for name, how in EXPECTED.items() if how != BY_MORE] if whole else list(SAMPLE)
    check_results(names, run_suite(names, tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_torchs_own_tests_of_more_ranks_pass(whole: bool, tmp_path: Path) -> None:
    """One of groups of some of 8 ranks in two clusters; with `--whole` all."""
    if find_spec("expecttest") is None:
        pytest.skip("torch's tests import expecttest, which is not installed: pip install expecttest")
    names = [name for name, how in EXPECTED.items() if how == BY_MORE][: None if whole else 1]
    check_results(names, run_suite(names, tmp_path, MORE_CLUSTERS))


def check_results(names: Sequence[str], ranks: list[list[tuple[str, str, str]]]) -> None:
    """Every rank has found of each test what the list says."""
    for rank, of in enumerate(ranks):
        found = {name: outcome for name, outcome, _ in of}
        expected = {name: "passed" if EXPECTED[name] in ("passed", BY_MORE) else "skipped" for name in names}
        assert found == expected, f"rank {rank}: {[one for one in of if one[1] == 'failed']}"


def test_every_test_of_torch_is_listed() -> None:
    """One that a later version of torch adds is run or left out on purpose."""
    module = find_spec("torch.testing._internal.distributed")
    assert module is not None
    assert module.submodule_search_locations is not None
    text = (Path(module.submodule_search_locations[0]) / "distributed_test.py").read_text(encoding="utf-8")
    names = {line.split()[1].partition("(")[0] for line in text.splitlines() if line.startswith("        def test_")}
    assert names - EXPECTED.keys() == set(), "run them, and add what they do"
    assert set(SAMPLE) <= {name for name, outcome in EXPECTED.items() if outcome == "passed"}
