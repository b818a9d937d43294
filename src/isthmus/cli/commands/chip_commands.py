"""The command that compares chips by compute, memory and communication: score-chips."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from isthmus.cli.command import command
from isthmus.cli.commands.plan_commands import PANEL, find_chips
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.core.chip import Precision
from isthmus.core.errors import InputError
from isthmus.core.model import load_model
from isthmus.plan import (
    DimensionWeights,
    evaluate_chips,
    layer_matrix,
    model_weights,
    profile_model,
    render_chip_scores,
)

commands = typer.Typer()


@command(
    commands,
    panel=PANEL,
    name="score-chips",
    examples=[
        "isthmus score-chips H100 H20 910B",
        "isthmus score-chips H100 H20 --model config.json --sequence 8192",
        "isthmus score-chips --pool pool.yaml --weights compute=2,memory=1 --json | jq '.chips[0].chip'",
    ],
)
def score_chips(
    env: CliEnvironment,
    chips: Annotated[list[str] | None, typer.Argument(metavar="[CHIP]...", help="Chips (default: all).")] = None,
    pool: Annotated[Path | None, typer.Option(metavar="FILE", help="A pool file that defines chips.")] = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="WEIGHTS", help="Such as compute=2,memory=1; those left out are 0 (default: all equal)."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Weigh by the seconds that this model's forward takes on the first chip."),
    ] = None,
    sequence: Annotated[int, typer.Option(min=1, metavar="TOKENS", help="Sequence length, with --model.")] = 4096,
    precision: Annotated[
        Precision, typer.Option(metavar="FORMAT", help=f"Number format of the peak: {'|'.join(get_args(Precision))}.")
    ] = "bf16",
) -> None:
    """Score chips by compute, memory and communication, each relative to the best of them."""
    if weights is not None and model is not None:
        raise InputError("both --weights and --model", hint="give one: --model computes the weights")
    compared = find_chips(chips, pool)
    weighed = DimensionWeights.parse(weights) if weights is not None else DimensionWeights()
    if model is not None:
        rows = layer_matrix(profile_model(load_model(model)), sequence_length=sequence, num_tokens=sequence)
        weighed = model_weights(rows, compared[0], precision=precision)
    shares = weighed.shares()
    scores = evaluate_chips(compared, weighed, precision=precision)
    head = "weights: " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    env.answer(
        {"precision": precision, "weights": shares, "chips": [vars(one) for one in scores]},
        lambda: f"{head}\n\n{render_chip_scores(scores)}",
    )
