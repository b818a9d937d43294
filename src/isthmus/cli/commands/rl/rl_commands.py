"""Commands on reinforcement learning: `rl delta`, `rl apply`, `rl ledger`, `rl audit` and `rl sample`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli.command import JobArgument, command
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.client.api_client import ApiClient
from isthmus.client.resolve_job import TERMINAL_STATES, select_job
from isthmus.core.errors import NotFoundError, UnavailableError
from isthmus.core.job import with_own_folders
from isthmus.core.units import format_bytes
from isthmus.core.views.api_views import JobView

if TYPE_CHECKING:
    from isthmus.weights import DeltaSummary

commands = typer.Typer()
PANEL = "Reinforcement learning"
READ_TIMEOUT_S = 300.0
"""Longest time to read a ledger."""
RECOMPUTE_TIMEOUT_S = 3600.0
"""Longest time to recompute the samples of a step."""
rl_commands = typer.Typer(help="Deltas between versions of weights, and the ledger of a job.", no_args_is_help=False)
commands.add_typer(rl_commands, name="rl", rich_help_panel=PANEL)

OldArgument = Annotated[Path, typer.Argument(metavar="OLD", help="A safetensors file: the version that changes.")]


@command(
    rl_commands,
    panel=PANEL,
    examples=[
        "isthmus rl delta step-7/model.safetensors step-8/model.safetensors -o 8.delta",
        "isthmus rl delta old.safetensors new.safetensors -o new.delta --json | jq '.bytes / .changed'",
    ],
)
def delta(
    env: CliEnvironment,
    old: OldArgument,
    new: Annotated[Path, typer.Argument(metavar="NEW", help="A safetensors file with the same tensors.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The delta.")],
) -> None:
    """Write what changed between two versions of weights, without loss.

    Changes of bfloat16 and float16 are coded in about a byte each; a block is sent in full where that is smaller.
    """
    from isthmus.weights import write_delta

    _answer(env, output, lambda: write_delta(old, new, output))


@command(
    rl_commands,
    panel=PANEL,
    examples=["isthmus rl apply step-7/model.safetensors 8.delta -o step-8/model.safetensors"],
)
def apply(
    env: CliEnvironment,
    old: OldArgument,
    delta: Annotated[Path, typer.Argument(metavar="DELTA", help="A file that `isthmus rl delta` wrote.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The new version.")],
) -> None:
    """Make the next version of weights from a version and a delta, bit for bit.

    A delta for another version, one that was cut short or altered is refused, and nothing is written.
    """
    from isthmus.weights import apply_delta

    _answer(env, output, lambda: apply_delta(old, delta, output))


@command(
    rl_commands,
    panel=PANEL,
    examples=["isthmus rl ledger sums", "isthmus rl ledger sums --json | jq '.tokens, .lost, .doubled'"],
)
def ledger(env: CliEnvironment, client: ApiClient, job: JobArgument) -> None:
    """Show what became of the samples of a job: by fate, tokens by owner, cluster and fate, staleness, bytes.

    It reads the job's ledger in `checkpoints.folder`, on this machine: run it where that folder is, also while the job
    runs. `lost` and `doubled` count prompts and are 0. `bytes` are those that the links to each cluster carried.
    """
    view = select_job(client.jobs(), job)
    found = _ask_ledger(view)
    found["owners"] = _by_owner(found["tokens"], _owners(client, view))
    env.answer(found, lambda: _ledger_text(found))


@command(
    rl_commands,
    panel=PANEL,
    examples=[
        "isthmus rl audit sums --step 7",
        "isthmus rl audit sums --step 7 --json | jq '.differing, .after_run.owners'",
        "isthmus rl audit sums --step 7 --samples 20   (of a large model)",
    ],
)
def audit(
    env: CliEnvironment,
    client: ApiClient,
    job: JobArgument,
    step: Annotated[int, typer.Option("--step", metavar="N", min=0, help="A training step of the job.")],
    recompute: Annotated[
        bool | None,
        typer.Option(
            "--recompute/--no-recompute",
            help="Recompute samples now (default: once the job has ended).",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", metavar="N", min=1, help="Recompute at most N samples (default: all).")
    ] = None,
) -> None:
    """Show which samples of a step were computed again at the versions that they claim, and which differ.

    The share `rl.audit` of the samples is computed again while the job runs, before they are trained on. The owner of
    one that differs is named here, decodes no more, and its samples began again elsewhere. Once the job has ended all
    trained samples of the step are computed again here, on the CPU, whose versions of the weights are on disk: the
    checkpoints that the job keeps, and the model that it began with. `after_run` of the answer also counts those that
    cannot be, by reason. It reads `checkpoints.folder`, on this machine.
    """
    view = select_job(client.jobs(), job)
    if recompute or (recompute is None and view.state in TERMINAL_STATES):
        found = _ask(_recompute(view, step, samples), RECOMPUTE_TIMEOUT_S)
        found["after_run"]["owners"] = _by_owner(found["after_run"]["owners"], _owners(client, view))
    else:
        found = _ask_ledger(view, step)
    env.answer(found, lambda: "\n".join(_audit_lines(found)))


def _audit_lines(found: dict[str, Any]) -> list[str]:
    """Return what audits of a step found as lines."""
    lines = [f"step {found['step']}: {found['recomputed']:,} of {found['samples']:,} samples recomputed"]
    if (after := found.get("after_run")) is not None:
        lines[0] += f" while it ran, {after['recomputed']:,} of {after['samples']:,} trained ones now"
        lines += [f"{one['samples']:,} not now: {one['reason']}" for one in after["not_recomputed"]]
    for one in found["differing"]:
        lines.append(f"prompt {one['sample'][0]}, sample {one['sample'][1]} of {one['owner']}: {one['problem']}")
    return lines if found["differing"] else [*lines, "none differs"]


@command(
    rl_commands,
    panel=PANEL,
    examples=[
        "isthmus rl sample sums --prompt 40",
        "isthmus rl sample sums --prompt 40 --json | jq '.samples[0].ranges'",
    ],
)
def sample(
    env: CliEnvironment,
    client: ApiClient,
    job: JobArgument,
    prompt: Annotated[int, typer.Option("--prompt", metavar="N", min=0, help="A prompt, by its number in the ledger.")],
) -> None:
    """Show the life of the samples of a prompt: who made which tokens by which version, rewards, step and fate.

    Samples that began again are shown too. It reads the job's ledger in `checkpoints.folder`, on this machine. Records
    of samples that no checkpoint goes back to are counts by then.
    """
    found = _ask_ledger(select_job(client.jobs(), job), "prompt", prompt)
    env.answer(found, lambda: "\n".join(_life_text(one, found["first_step"]) for one in found["samples"]))


def _life_text(one: dict[str, Any], first_step: int) -> str:
    """Return the life of a sample as a line."""
    parts = []
    for piece in one["ranges"]:
        by = f" ({piece['engine']}), version {piece['version'] + first_step}"
        by = "" if piece["owner"] == piece["engine"] else by
        parts.append(f"tokens {piece['start']} to {piece['end'] - 1} by {piece['owner']}{by}")
    if one["engine"]:
        parts.append(f"runs on {one['engine']}")
    if one["audit"]:
        parts.append(f"recomputed: {one['audit']['problem'] or 'the same'}")
    if one["reward"] is not None:
        parts.append(f"reward {one['reward']:g}")
    step = "" if one["step"] is None else f" in step {one['step'] + first_step}"
    again = f", attempt {one['sample'][2] + 1}" if one["sample"][2] else ""
    return f"sample {one['sample'][1]}{again}: " + "; ".join([*parts, f"{one['state']}{step}"])


def _ask_ledger(view: JobView, *of: int | str) -> dict[str, Any]:
    """Return what the ledger of a job says: its counts, those of a step, or (`prompt`, number) the lives of samples."""
    folder = with_own_folders(view.job, view.id).checkpoints.folder
    return _ask(lambda: _read_ledger([folder, *map(str, of)]), READ_TIMEOUT_S)


def _recompute(view: JobView, step: int, samples: int | None) -> Callable[[], subprocess.CompletedProcess[bytes]]:
    """Return what recomputes samples of a step, in a process with the workers' packages."""
    job = with_own_folders(view.job, view.id).model_dump_json().encode()
    numbers = [str(one) for one in (step, samples) if one is not None]
    return lambda: _run_module("recompute_samples", numbers, RECOMPUTE_TIMEOUT_S, job)


def _ask(run: Callable[[], subprocess.CompletedProcess[bytes]], timeout_s: float) -> dict[str, Any]:
    """Return what a process that reads the ledger answers."""
    try:
        done = run()
    except subprocess.TimeoutExpired as error:
        hint = "see whether its disk answers; an audit of fewer samples (--samples) takes less"
        raise UnavailableError(f"the ledger was not read within {timeout_s:g} s", hint=hint) from error
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        hint = "install isthmus with its workers' packages here: pip install 'isthmus[train]'"
        raise UnavailableError("the ledger cannot be read on this machine", hint=hint) from error
    if "error" in found:
        raise NotFoundError(found["error"], hint=found["hint"])
    return found


def _read_ledger(arguments: list[str]) -> subprocess.CompletedProcess[bytes]:
    """Return what a process with the workers' packages says of the ledger: the pool itself has no torch."""
    return _run_module("show_ledger", arguments, READ_TIMEOUT_S)


def _run_module(
    name: str, arguments: list[str], timeout_s: float, content: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(  # noqa: S603 - this Python with a module of this package
        [sys.executable, "-m", f"isthmus.rl.process.{name}", *arguments],
        input=content, capture_output=True, check=False, timeout=timeout_s,
    )  # fmt: skip


def _owners(client: ApiClient, view: JobView) -> dict[str, str]:
    """Return the owner of each cluster of the pool and of the job."""
    owners = {one.cluster.name: one.cluster.owner for one in client.pool().clusters}
    return owners | {part.cluster: part.owner for part in view.parts}


def _by_owner(counts: dict[str, dict[str, int]], owners: dict[str, str]) -> dict[str, dict[str, int]]:
    """Return counts by owner and kind; a cluster that is no longer in the pool stands for its owner."""
    found: dict[str, dict[str, int]] = {}
    for cluster, by_kind in counts.items():
        total = found.setdefault(owners.get(cluster, cluster), {})
        for kind, count in by_kind.items():
            total[kind] = total.get(kind, 0) + count
    return found


def _ledger_text(found: dict[str, Any]) -> str:
    """Return the counts of a ledger as lines."""
    fates = ", ".join(f"{count:,} {fate}" for fate, count in found["samples"].items())
    lines = [f"samples: {fates}; prompts lost {found['lost']}, doubled {found['doubled']}"]
    for owner, by_fate in found["owners"].items():
        lines.append(f"{owner}: " + ", ".join(f"{count:,} tokens {fate}" for fate, count in by_fate.items()))
    for name, count in found["bytes"].items():
        sizes = [format_bytes(count[one]) for one in ("sent_bytes", "weights_bytes", "received_bytes")]
        source, arrow, target = name.rpartition(">")
        link = f"link from {source} to {target}" if arrow else f"link to {name}"
        lines.append(f"{link}: {sizes[0]} sent, of which {sizes[1]} weights, {sizes[2]} received")
    for name, count in found["audits"].items():
        lines.append(f"audits of {name}: {count['samples']:,} samples, {count['differing']:,} differ")
    lines += [f"{name} decodes no more: {why}" for name, why in found["barred"].items()]
    ages = ", ".join(f"{count:,} of {age}" for age, count in found["staleness"].items())
    return "\n".join([*lines, f"trained tokens by staleness: {ages or 'none'}"])


def _answer(env: CliEnvironment, output: Path, work: Callable[[], DeltaSummary]) -> None:
    """Do the work and print what it came to, with the CPU seconds that it took."""
    start_s = time.process_time()
    found = work()
    cpu_s = time.process_time() - start_s
    answer = {
        "changed": found.num_changed, "bytes": found.num_bytes, "full_bytes": found.full_bytes, "cpu_s": cpu_s,
        "base": found.base, "target": found.target,
    }  # fmt: skip
    env.answer(
        answer,
        lambda: (
            f"{output}: {found.num_changed:,} changed values, delta of {format_bytes(found.num_bytes)} for "
            f"{format_bytes(found.full_bytes)} of weights, {cpu_s:.2f} CPU s; {found.base[:12]} -> {found.target[:12]}"
        ),
    )
