"""`rollouts_table`: the predicted step of a job with `task: rl`: training, decoding, waiting, and bytes of links."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from isthmus.cli.terminal.tables import table
from isthmus.core.plan import Prediction
from isthmus.core.units import format_bytes, format_seconds


def rollouts_table(step: Prediction) -> RenderableType:
    """Return the prediction as text and tables."""
    made = step.rollouts
    if made is None:
        raise ValueError("a prediction without rollouts")
    text = (
        f"A step takes {format_seconds(step.iteration_s)}: training {format_seconds(made.train_s)}, waiting for "
        f"samples {format_seconds(made.wait_samples_s)}. Tokens are {made.staleness:.2g} versions old in the mean; a "
        f"version is sent as {format_bytes(made.weights_bytes)}. Cost {step.cost_per_iteration:.3g} {step.currency}"
    )
    columns = ("decodes at", "ranks", "sequences", "tokens/s", "decodes", "no samples", "no weights", "weights by")
    rows = [
        (
            one.cluster, str(one.ranks), str(one.sequences), f"{one.tokens_per_s:,.0f}", format_seconds(one.decode_s),
            format_seconds(one.wait_samples_s), format_seconds(one.wait_weights_s), " > ".join(one.weights_way),
        )
        for one in made.sites
    ]  # fmt: skip
    right = "ranks|sequences|tokens/s|decodes|no samples|no weights"
    parts: list[RenderableType] = [
        Text(""),
        Text(text.rstrip() + "."),
        Text(""),
        table("Rollouts", columns, rows, right),
    ]
    if made.link_bytes:
        links = [(name.replace(">", " to "), format_bytes(num)) for name, num in made.link_bytes.items()]
        parts += [Text(""), table("Bytes of a step", ("link", "bytes"), links, "bytes")]
    return Group(*parts)
