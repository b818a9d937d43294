"""Plans to export, written by hand, and the plans that hypothesis draws."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st

from isthmus.core.plan import Plan, Stage


def staged(cuts: tuple[int, ...], *, dp: int = 1, clusters: str = "ab", **fields: object) -> Plan:
    """Return a plan of `dp` equal replicas whose stages have `cuts` layers, the first half on cluster a.

    `fields` are the plan's or, known only there, a stage's.
    """
    own = {key: fields.pop(key) for key in list(fields) if key in Stage.model_fields and key not in Plan.model_fields}
    stages = []
    for replica in range(dp):
        first = 0
        for number, count in enumerate(cuts):
            cluster = clusters[number * len(clusters) // len(cuts)]
            stages.append(
                Stage(
                    replica=replica,
                    cluster=cluster,
                    node_group="g",
                    layers=(first, first + count),
                    **own,  # type: ignore[arg-type]
                )
            )
            first += count
    known = {"id": "p", "micro_batches": 8, "micro_batch_size": 1, "sequence_length": 4096}
    return Plan.model_validate(known | {"stages": stages, "dp": dp} | fields)


def with_stages(plan: Plan, stages: Iterable[Stage]) -> Plan:
    """Return the plan with other stages, validated again."""
    return Plan.model_validate(dict(plan) | {"stages": tuple(stages)})


@st.composite
def grids(draw: st.DrawFn) -> Plan:
    """Draw a plan that Megatron-LM has words for: equal replicas, any cut, chunks, degrees, recomputation."""
    pp = draw(st.integers(1, 6))
    chunks = draw(st.integers(1, 3)) if pp > 1 else 1
    cuts = tuple(draw(st.integers(chunks, 9)) for _ in range(pp))
    tp, cp = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2)))
    most = draw(st.integers(0, max(cuts))) if chunks == 1 else draw(st.sampled_from((0, max(cuts))))
    plan = staged(
        cuts,
        dp=draw(st.integers(1, 4)),
        tp=tp,
        cp=cp,
        sp=tp > 1 and draw(st.booleans()),
        micro_batches=pp * draw(st.integers(1, 4)),
        micro_batch_size=draw(st.integers(1, 3)),
        schedule="interleaved" if chunks > 1 else "1f1b",
        chunks=chunks if chunks > 1 else None,
        zero=draw(st.sampled_from((0, 1))),
        overlap_gradients=draw(st.booleans()),
    )
    stages = [
        stage.model_copy(
            update={
                "recompute": "full" if most else "none",
                "recompute_layers": min(most, stage.num_layers) if most else None,
            }
        )
        for stage in plan.stages
    ]
    return with_stages(plan, stages)
