"""50 pairs of jobs that share a checkpoint folder, an output or a name, and what a real pool does with the second.

    python -m benchmarks._first_hour_pairs --pairs 50 --train 3

The second job of a pair differs from the first in one field, or in none. Where the two share a folder, the second
is to be refused before it starts; where they share a name only, it is to train all its steps into its own folders.
Anything else is a silent reuse or overwriting. Of the pairs, `--train` are trained by real workers; in the others
the first job waits for its user, and the server alone decides.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from isthmus.cli import main as run_command
from isthmus.cli.demo.demo_pool import DemoPool
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.client.api_client import ApiClient
from isthmus.core.pool import Pool
from isthmus.core.views.api_views import JobView

NUM_PAIRS = 50
STEPS = 2
WAIT_S = 120.0
ENDED = ("succeeded", "failed", "cancelled")

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 260, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}  # fmt: skip

SHARED = tuple(names for size in (1, 2, 3) for names in itertools.combinations(("checkpoints", "output", "name"), size))
"""What the two jobs of a pair have in common."""

CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "learning rate": {"training": {"learning_rate": 1e-3}},
    "seed": {"training": {"seed": 2}},
    "batch": {"training": {"global_batch_size": 4}},
    "sequence": {"training": {"sequence_length": 32}},
    "steps": {"training": {"steps": STEPS + 2}},
    "architecture": {"model": "wide"},
    "data": {"data": {"paths": ["more.txt"]}},
}
"""What the second job of a pair changes, by name."""


@dataclass(frozen=True)
class Pair:
    """Two job files as mappings; `must_refuse` says that the second has to be refused while the first's files exist."""

    name: str
    shared: tuple[str, ...]
    first: dict[str, Any]
    second: dict[str, Any]

    @property
    def must_refuse(self) -> bool:
        """Whether the two share a folder."""
        return "checkpoints" in self.shared or "output" in self.shared


@dataclass(frozen=True)
class PairResult:
    """What became of a pair: the message that refused the second job (empty: accepted), and what went wrong."""

    pair: Pair
    refusal: str
    silent_reuse: str = ""


def make_pairs(count: int = NUM_PAIRS) -> list[Pair]:
    """Return up to 56 pairs; paths are relative to the folder that `write_inputs` fills."""
    chosen = list(itertools.islice(itertools.product(CHANGES.items(), SHARED), count))
    return [_make_pair(number, change, fields, shared) for number, ((change, fields), shared) in enumerate(chosen)]


def write_inputs(folder: Path) -> None:
    """Write the models and texts that the pairs name."""
    for name, hidden_size in (("model", 32), ("wide", 48)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": hidden_size}))
    text = "".join(f"The {n}th line says that {n} times {n} is {n * n}. " for n in range(300))
    (folder / "text.txt").write_text(text)
    (folder / "more.txt").write_text(text + text[::-1])


def run_pairs(pool: DemoPool, pairs: Sequence[Pair], num_trained: int) -> Iterator[PairResult]:
    """Submit both jobs of each pair with the command line; `num_trained` pairs, spread evenly, are trained."""
    trained = {round(one * len(pairs) / num_trained) for one in range(num_trained)} if num_trained else set()
    for number, pair in enumerate(pairs):
        yield run_pair(pool, pair, trains=number in trained)


def run_pair(pool: DemoPool, pair: Pair, *, trains: bool) -> PairResult:
    """Submit the first job, and the second once the first has trained, or while it waits for its user."""
    client, policy = pool.client, "auto" if trains else "manual"
    first, refusal = submit_file(pool, pair.first | {"policy": policy})
    if first is None:
        return PairResult(pair, "", f"the first job was refused: {refusal}")
    if trains and (ended := _wait_ended(client, first.id)).state != "succeeded":
        return PairResult(pair, "", f"the first job {ended.state}: {ended.reason}")
    before = _digests(first)
    second, refusal = submit_file(pool, pair.second | {"policy": policy})
    wrong = _find_reuse(client, pair, first, second, before, trains=trains)
    for view in (first, second):
        if view is not None and client.job(view.id).state not in ENDED:
            client.cancel(view.id)
            _wait_ended(client, view.id)
    return PairResult(pair, refusal if second is None else "", wrong)


def submit_file(pool: DemoPool, job: dict[str, Any]) -> tuple[JobView | None, str]:
    """Submit a job file with `isthmus submit`; return the job, or None and the refusal."""
    file = pool.folder / "submitted.yaml"
    file.write_text(yaml.safe_dump(job))
    out = io.StringIO()
    env = CliEnvironment(variables={"HOME": str(pool.folder)}, stdout=out, stderr=io.StringIO())
    options = ("--server", pool.server, "--token-file", str(pool.folder / "user.token"), "--json", "--no-wait")
    status = run_command(["submit", str(file), *options], env=env)
    answer = json.loads(out.getvalue())
    return (JobView.model_validate(answer), "") if status == 0 else (None, answer["message"])


def _make_pair(number: int, change: str, fields: dict[str, Any], shared: tuple[str, ...]) -> Pair:
    training = {"steps": STEPS, "sequence_length": 16, "global_batch_size": 2, "precision": "fp32"}
    base = {"model": "model", "data": {"paths": ["text.txt"], "validation_fraction": 0.1}, "training": training}
    first, second = (
        base | {"name": f"p{number}-{side}", "output": f"out-{number}-{side}", "checkpoints": _folder(number, side)}
        for side in ("a", "b")
    )
    second |= fields | {"training": training | fields.get("training", {})}
    second["data"] = base["data"] | fields.get("data", {})
    second |= {name: first[name] for name in shared}
    return Pair(f"{number}: {change}; shared {' and '.join(shared)}", shared, first, second)


def _folder(number: int, side: str) -> dict[str, Any]:
    return {"folder": f"ck-{number}-{side}", "every_steps": 0}


def _find_reuse(
    client: ApiClient, pair: Pair, first: JobView, second: JobView | None, before: dict[str, str], *, trains: bool
) -> str:
    """Return how the second job reused or overwrote the first one's files, or was refused for nothing; empty if not."""
    if (second is None) != pair.must_refuse:
        return "the second job was refused without a shared folder" if second is None else "the second job was accepted"
    if second is not None and trains:
        ended = _wait_ended(client, second.id)
        steps = {one.step for one in client.metrics(second.id).metrics}
        if ended.state != "succeeded" or steps != set(range(ended.job.training.steps)):
            return f"the second job {ended.state} after steps {sorted(steps)}: {ended.reason}"
    return "" if _digests(first) == before else "the first job's files have changed"


def _digests(view: JobView) -> dict[str, str]:
    """Return the digest of every file below the folders of a job."""
    folders = (Path(view.job.output), Path(view.job.checkpoints.folder))
    files = (one for folder in folders for one in sorted(folder.rglob("*")) if one.is_file())
    return {str(one): hashlib.sha256(one.read_bytes()).hexdigest() for one in files}


def _wait_ended(client: ApiClient, job: str) -> JobView:
    deadline_s = time.monotonic() + WAIT_S
    while (view := client.job(job)).state not in ENDED:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"job {job} is still {view.state} after {WAIT_S:g} s: {view.reason}")
        time.sleep(0.05)
    return view


def emulated_pool() -> dict[str, Any]:
    """Return the pool file of two sites of one core each."""
    group = {"name": "cpu", "chip": "CPU-core", "nodes": 1, "chips_per_node": 1, "virtual": {"memory_scale": 1.0}}
    clusters = [{"name": name, "owner": f"{name}-owner", "node_groups": [group]} for name in ("north", "south")]
    link = {"between": ["north", "south"], "bandwidth_gbps": 1, "round_trip_ms": 2}
    return {"clusters": clusters, "links": [link]}


def main() -> int:
    """Run the pairs on a pool of this machine; return 1 if there was a silent reuse or overwriting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=NUM_PAIRS, metavar="N")
    parser.add_argument("--train", type=int, default=3, metavar="N", help="pairs that real workers train")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        (folder / "pool.yaml").write_text(yaml.safe_dump(emulated_pool()))
        with DemoPool(folder, Pool.model_validate(emulated_pool())) as pool:
            results = list(run_pairs(pool, make_pairs(options.pairs), options.train))
    for one in results:
        print(f"{one.pair.name}: {one.silent_reuse or one.refusal or 'accepted, in folders of its own'}")
    silent = sum(bool(one.silent_reuse) for one in results)
    print(f"{len(results)} pairs, {sum(bool(one.refusal) for one in results)} refused, silent reuse {silent}")
    return 1 if silent else 0


if __name__ == "__main__":
    raise SystemExit(main())
