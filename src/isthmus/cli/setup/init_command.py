"""`isthmus init`: the first job, pool and site files."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer

from isthmus.cli.command import command
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.cli.setup.first_files import FirstAnswers, FirstCluster, default_name, parse_clusters, write_first_files
from isthmus.core.errors import InputError, IsthmusError
from isthmus.core.model import load_model, require_trainable

commands = typer.Typer()
DEFAULT_CLUSTERS = "here=CPU-core:1x2"

_Value = TypeVar("_Value")


@command(
    commands,
    panel="Start here",
    examples=[
        "isthmus init",
        "isthmus init first-job --model models/llama --data '/data/*.jsonl' --steps 1000",
        "isthmus init pair --cluster hangzhou@zhejiang=H20:2x8 --cluster nanjing@jiangsu=BI-V150:4x8",
    ],
)
def init(
    env: CliEnvironment,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the files are written.")] = Path(),
    name: Annotated[str | None, typer.Option(metavar="NAME", help="The job's name (default: the folder's).")] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="MODEL", help="A Hugging Face folder or config.json (default: a small one).")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="Training text, repeatable (default: Python's standard library)."),
    ] = None,
    task: Annotated[
        Literal["pretrain", "continue", "finetune"],
        typer.Option(metavar="pretrain|continue|finetune", help="What to train."),
    ] = "pretrain",
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Training steps.")] = 100,
    cluster: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[@OWNER]=CHIP:NODESxCHIPS",
            help=f"A cluster, repeatable (default: {DEFAULT_CLUSTERS}); `isthmus chips` lists the chips.",
        ),
    ] = None,
    bandwidth_gbps: Annotated[
        float, typer.Option("--bandwidth", metavar="GBPS", min=1e-3, help="Of each link between clusters, in Gbit/s.")
    ] = 10.0,
    round_trip_ms: Annotated[
        float, typer.Option("--round-trip", metavar="MS", min=0, help="Between two clusters, in milliseconds.")
    ] = 20.0,
    policy: Annotated[
        Literal["manual", "auto"], typer.Option(metavar="manual|auto", help="Choose a plan, or take the fastest.")
    ] = "manual",
    yes: Annotated[bool, typer.Option("--yes", help="Take the defaults instead of asking.")] = False,
) -> None:
    """Write commented job, pool, site and policy files that can be planned at once.

    On a terminal it asks for the name, model, data and clusters that no option gives. It never overwrites a file.
    """
    asks = env.interactive and not yes
    name = name or (_ask(env, "Name of the job", default_name(folder), str) if asks else default_name(folder))
    if model is None and asks:
        model = _ask(env, "Model: a folder or config.json", "a small one", _parse_model)
    if data is None and asks:
        data = _ask(env, "Training text: files, folders or globs", "Python's standard library", _parse_data)
    if cluster is None and asks:
        wanted = "Clusters: NAME[@OWNER]=CHIP:NODESxCHIPS, separated by commas"
        clusters = _ask(env, wanted, DEFAULT_CLUSTERS, lambda text: parse_clusters([text]))
    else:
        clusters = parse_clusters(cluster or [DEFAULT_CLUSTERS])
    if not clusters:
        raise InputError("no cluster is given", hint=f"for example --cluster {DEFAULT_CLUSTERS}")
    answers = FirstAnswers(
        name=name, model=model, data=tuple(map(_absolute, data or ())), task=task, steps=steps, clusters=clusters,
        bandwidth_gbps=bandwidth_gbps, round_trip_ms=round_trip_ms, policy=policy,
    )  # fmt: skip
    written = write_first_files(folder, answers)
    following = _next_commands(folder, clusters)
    lines = [
        *(f"wrote {path}" for path in written),
        "next (serve and agent run until Ctrl-C):",
        *(f"  {one}" for one in following),
    ]
    env.answer({"files": list(map(str, written)), "next": following}, lambda: "\n".join(lines))


def _ask(env: CliEnvironment, question: str, default: str, parse: Callable[[str], _Value]) -> _Value:
    """Return the parsed answer; an empty line or the end of the input takes `default`, an error asks again."""
    while True:
        answer = env.read_answer(f"{question} [{default}]: ")
        try:
            return parse(answer or default)
        except IsthmusError as error:
            env.print_note(f"{error.message}" + (f" ({error.hint})" if error.hint else ""))
            if answer is None:
                raise


def _parse_model(text: str) -> Path | None:
    if text == "a small one":
        return None
    require_trainable(load_model(text))
    return Path(text)


def _parse_data(text: str) -> list[str]:
    try:
        return [] if text == "Python's standard library" else shlex.split(text)
    except ValueError as error:
        raise InputError(f"'{text[:80]}' cannot be split into paths: {error}", hint="close the quotes") from error


def _absolute(path: str) -> str:
    """Return a path that is relative to this process as the job file needs it."""
    return path if "://" in path else str(Path(path).expanduser().absolute())


def _next_commands(folder: Path, clusters: Sequence[FirstCluster]) -> list[str]:
    """Return the commands from the files to a running job; server and agents run until they are stopped."""

    def path(name: str) -> str:
        return shlex.quote(str(folder / name))

    admin, job, pool = path("server/admin.token"), path("job.yaml"), path("pool.yaml")
    sites = []
    for one in clusters:
        name, token = shlex.quote(one.name), path(f"{one.owner}.token")
        sites.append(f"isthmus token create --owner {shlex.quote(one.owner)} --token-file {admin} > {token}")
        state = path(f"agent-{one.name}")
        sites.append(f"isthmus agent --pool {pool} --cluster {name} --state {state} --token-file {token}")
    return [
        f"isthmus plan {job} --pool {pool}",
        f"isthmus serve --state {path('server')} --pool {pool}",
        *sites,
        f"isthmus submit {job} --watch --token-file {admin}",
        "isthmus doctor",
    ]
