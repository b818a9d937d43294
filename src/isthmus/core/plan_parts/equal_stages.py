"""`with_equal_stages`: the stages of a plan that lists one, whose layers `equal_stages` stages share evenly."""

from __future__ import annotations

from typing import Any


def with_equal_stages(data: dict[str, Any], most: int) -> dict[str, Any]:
    """Return `data` with its only stage cut into `equal_stages` of as many layers, at most `most` of them.

    Stage i of n holds the layers from i L // n to (i + 1) L // n, so sizes differ by at most one. Raises `ValueError`
    for another number of stages listed, or more stages than layers.
    """
    fields = {key: value for key, value in data.items() if key != "equal_stages"}
    count, stages = data["equal_stages"], fields.get("stages")
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most:
        raise ValueError(f"equal_stages: {count!r:.40} is no number of stages from 1 to {most:,}")
    if not isinstance(stages, list | tuple) or len(stages) != 1 or not isinstance(stages[0], dict):
        raise ValueError("equal_stages: list one stage, with all layers; the stages are cut from it")
    layers = stages[0].get("layers")
    if not isinstance(layers, list | tuple) or [type(one) for one in layers] != [int, int] or layers[0] != 0:
        raise ValueError(f"equal_stages: layers {layers!r:.40} of the stage listed must be [0, number of layers]")
    if layers[1] < count:
        raise ValueError(f"equal_stages: {count} stages of {layers[1]} layers; nearest valid: {layers[1]}")
    cuts = [index * layers[1] // count for index in range(count + 1)]
    fields["stages"] = [{**stages[0], "layers": [cuts[i], cuts[i + 1]]} for i in range(count)]
    return fields
