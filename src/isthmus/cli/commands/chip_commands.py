"""The command that lists chips, and compares them by compute, memory and communication: chips."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer
from pydantic import BaseModel

from isthmus.cli.command import command
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.core.chip import Chip, Precision, chip_catalogue
from isthmus.core.errors import InputError

commands = typer.Typer()
PANEL = "Know before you run"


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus chips",
        "isthmus chips --json | jq '.H20.source'",
        "isthmus chips A100 H100 H20 --weights compute=2,memory=1",
        "isthmus chips A100 H100 --model config.json --sequence 8192",
        "isthmus chips --pool pool.yaml --weights compute,memory,communication --json | jq '.chips[0].chip'",
    ],
)
def chips(
    env: CliEnvironment,
    chips: Annotated[list[str] | None, typer.Argument(metavar="[CHIP]...", help="Chips (default: all).")] = None,
    pool: Annotated[Path | None, typer.Option(metavar="FILE", help="A pool file that defines chips.")] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="WEIGHTS",
            help="Score by these, such as compute=2,memory=1; a name alone weighs 1, those left out 0.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Score by the seconds that its forward takes on the first chip."),
    ] = None,
    sequence: Annotated[int, typer.Option(min=1, metavar="TOKENS", help="Sequence length, with --model.")] = 4096,
    precision: Annotated[
        Precision | None,
        typer.Option(
            metavar="FORMAT",
            help=f"Score compute in this format (default: bf16 and int8): {'|'.join(get_args(Precision))}.",
        ),
    ] = None,
) -> None:
    """List chips with the source of their data, or score them by compute, memory and communication.

    With --weights or --model, each dimension is a ratio to the best of the chips. A measured value counts where every
    chip has one: throughput, capacity, bandwidth and latency of the memory, bandwidth and latency of the link.
    """
    from isthmus.cli.commands.plan_commands import find_chips

    compared = find_chips(chips, pool) if chips or pool else list(chip_catalogue().values())
    if weights is None and model is None:
        _list_chips(env, compared)
    else:
        _score_chips(env, compared, weights, model, sequence, precision)


def _list_chips(env: CliEnvironment, listed: list[Chip]) -> None:
    known: dict[str, BaseModel] = {chip.name: chip for chip in listed}

    def show() -> object:
        from isthmus.cli.terminal.tables import chips_table

        return chips_table(listed)

    env.answer(known, show)


def _score_chips(
    env: CliEnvironment,
    compared: list[Chip],
    weights: str | None,
    model: str | None,
    sequence: int,
    precision: Precision | None,
) -> None:
    from isthmus.core.model import load_model
    from isthmus.plan import (
        DimensionWeights,
        evaluate_chips,
        layer_matrix,
        model_weights,
        profile_model,
        render_chip_scores,
    )

    if weights is not None and model is not None:
        raise InputError("both --weights and --model", hint="give one: --model computes the weights")
    weighed = DimensionWeights() if weights is None else DimensionWeights.parse(weights)
    if model is not None:
        rows = layer_matrix(profile_model(load_model(model)), sequence_length=sequence, num_tokens=sequence)
        weighed = model_weights(rows, compared[0], precision=precision or "bf16")
    shares = weighed.shares()
    found = evaluate_chips(compared, weighed, precision=precision)
    head = "weights: " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    answer = {
        "precision": precision,
        "weights": shares,
        "chips": [vars(one) for one in found.scores],
        "measured": list(found.measured),
        "unmeasured": {name: list(lacking) for name, lacking in found.unmeasured.items()},
    }
    env.answer(answer, lambda: f"{head}\n\n{render_chip_scores(found)}")
