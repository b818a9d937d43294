"""How long the planner searches: 48 to 100,000 chips, again after a change; how good its bound is.

`python -m benchmarks.search_scale [--json] [--quick]`. Seconds are CPU seconds of this process and include the
simulation of the finalists and the proof of the bound; memory is the peak of the process. The peers' figures
come from their publications and from runs on two shared cores (Sailor: 3.9 s at 512 chips, 59 s and 4.35 GB at
8,192).
"""

from __future__ import annotations

import argparse
import gc
import resource
import time

from benchmarks._planning import LLAMA2_7B, LLAMA2_70B, deepseek_v2_lite, gemma2_27b, job, llama, pool
from benchmarks.table import Row, print_rows
from isthmus.core.pool import Pool
from isthmus.plan.profile.layer_profile import ModelProfile
from isthmus.plan.search.compose.plan_layout import PlanLayout
from isthmus.plan.search.search_plans import SearchRequest, SearchResult, search_plans

KINDS = ("A100", "H100", "910B", "A800")


def sites(chips: int, count: int, gbps: float) -> Pool:
    """Return `count` sites with chips of one of four types each, `chips` in all."""
    each = chips // count
    return pool({f"site{i}": [(KINDS[i % 4], each)] for i in range(count)}, gbps, 20)


CASES: tuple[tuple[str, Pool, tuple[int, ...], int, float, str | None, float | None], ...] = (
    # what, pool, model, samples, CPU seconds allowed, peer, its seconds
    ("48 chips, Llama-2-7B", pool({"a": [("H100", 24)], "b": [("BI-V150", 24)]}, 100, 10),
     LLAMA2_7B, 256, 0.5, None, None),
    ("24 chips of 3 types at 3 sites, 10 Gbit/s between, Llama-2-7B",
     pool({"a": [("H100", 8)], "b": [("A100", 8)], "c": [("BI-V150", 8)]}, 10, 10),
     LLAMA2_7B, 64, 0.5, None, None),
    ("32 chips of 3 types at 4 sites, 10 Gbit/s between, Llama-2-7B",
     pool({"a": [("H100", 8)], "b": [("A100", 8)], "c": [("H100", 8)], "d": [("BI-V150", 8)]}, 10, 10),
     LLAMA2_7B, 64, 0.5, None, None),
    ("512 chips, A100 and V100 in one cluster, Llama-2-7B", pool({"a": [("A100", 128), ("V100", 384)]}, 1, 1),
     LLAMA2_7B, 1024, 0.5, "Sailor", 3.9),
    ("8,192 chips, A100 and V100 in one cluster, Llama-2-70B",
     pool({"a": [("A100", 2048), ("V100", 6144)]}, 1, 1), LLAMA2_70B, 4096, 3.0, "Sailor", 59.0),
    ("10,000 chips of 4 types at 4 sites, 3.2 Tbit/s between, Llama-2-70B", sites(9984, 4, 3200),
     LLAMA2_70B, 8192, 5.0, None, None),
    ("100,000 chips of 4 types at 8 sites, 3.2 Tbit/s between, Llama-2-70B", sites(99968, 8, 3200),
     LLAMA2_70B, 16384, 60.0, None, None),
)  # fmt: skip


def ask(
    model: ModelProfile, where: Pool, samples: int, near: tuple[PlanLayout, ...] = ()
) -> tuple[SearchResult, float]:
    """Return the answer, and the CPU seconds it took."""
    gc.collect()
    start_s = time.process_time()
    answer = search_plans(SearchRequest(job=job(samples), model=model, pool=where, explain=False, warm_start=near))
    return answer, time.process_time() - start_s


def unlike_rows() -> list[Row]:
    """Return the seconds for models whose layers differ: every other one, or the first."""
    where, found = pool({"a": [("H100", 24)], "b": [("A100", 24)]}, 100, 10), []
    for what, model in (("Gemma-2 27B", gemma2_27b()), ("DeepSeek-V2-Lite", deepseek_v2_lite())):
        answer, seconds = ask(model, where, 256)
        best_s = answer.plans[0].predicted.iteration_s if answer.plans[0].predicted else 0.0
        found.append(
            Row(
                what=f"search: 48 chips, {what} (layers differ; {answer.evaluated:,} chains cut; best "
                f"{best_s:.3g} s a step, {(best_s / answer.bound_s - 1) * 100:.2g} % over the bound)",
                ours=seconds, unit="CPU s", target="about 1", met=seconds <= 1.5,
            )
        )  # fmt: skip
    return found


def again_row(model: ModelProfile) -> Row:
    """Return the seconds of planning again at 10,000 chips after a node was lost."""
    where = sites(9984, 4, 3200)
    before, _ = ask(model, where, 8192)
    changed = where.model_dump(by_alias=True)
    changed["clusters"][0]["node_groups"][0]["nodes"] -= 1
    after = Pool.model_validate(changed)
    whole, _ = ask(model, after, 8192)
    near, seconds = ask(model, after, 8192, before.layouts[:2])
    worse = (near.scored[0].time_s / whole.scored[0].time_s - 1) * 100
    return Row(
        what=f"planning again near two old plans after a lost node, 10,000 chips ({worse:.2g} % slower plan)",
        ours=seconds, unit="CPU s", target="at most 1", met=seconds <= 1.0,
    )  # fmt: skip


def bound_row(chips: int, count: int, samples: int, allowed: float) -> Row:
    """Return how far the best plan is from what no plan can beat, in percent of it."""
    answer, _ = ask(llama(*LLAMA2_7B), sites(chips, count, 3200), samples)
    found = min(plan.predicted.iteration_s for plan in answer.plans if plan.predicted)
    gap = (found / answer.bound_s - 1) * 100
    return Row(
        what=f"gap to the proven bound, {chips:,} chips, Llama-2-7B, {samples:,} samples", ours=gap, unit="%",
        target=f"at most {allowed:g}", met=gap <= allowed,
    )  # fmt: skip


def rows(quick: bool) -> list[Row]:
    """Measure everything; `quick` leaves out what takes longer than some seconds."""
    found = []
    for what, where, dimensions, samples, allowed_s, peer, peer_s in CASES[: 5 if quick else None]:
        answer, seconds = ask(llama(*dimensions), where, samples)
        best_s = answer.plans[0].predicted.iteration_s if answer.plans[0].predicted else 0.0
        found.append(
            Row(
                what=f"search: {what} ({answer.evaluated:,} chains cut; best {best_s:.3g} s a step)",
                ours=seconds, unit="CPU s", peer=peer, peer_value=peer_s,
                ratio=seconds / peer_s if peer_s else None,
                target=f"at most {allowed_s:g}", met=seconds <= allowed_s,
            )
        )  # fmt: skip
    found += unlike_rows()
    if not quick:
        found.append(again_row(llama(*LLAMA2_70B)))
    found.append(bound_row(1000 // 16 * 16, 2, 4096, 5))
    if not quick:
        found.append(bound_row(9984, 4, 40960, 10))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found.append(
        Row(what="peak memory of all of these", ours=peak_mb, unit="MiB", target="under 2000",
            met=peak_mb < 2000)
    )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="small pools only")
    options = parser.parse_args()
    print_rows(rows(options.quick), options.json)


if __name__ == "__main__":
    main()
