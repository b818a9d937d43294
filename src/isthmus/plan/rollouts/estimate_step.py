"""`estimate_step_s`: the seconds of a step in closed form, to rank many options before a few are simulated."""

from __future__ import annotations

from isthmus.sim import DecodeSite, RolloutPipeline


def estimate_step_s(pipeline: RolloutPipeline) -> float:
    """Return the longest of training, decoding all samples, and a round of one version shared by `max_staleness + 1`.

    A round: a version is trained, comes down, decodes the samples that are longest, and their reports come up. In
    turns, training and decoding add up.
    """
    samples = pipeline.group * pipeline.batch_prompts
    all_s = samples / sum(samples_per_s(pipeline, one) for one in pipeline.sites)
    slowest = max(pipeline.sites, key=lambda one: _longest_s(pipeline, one))
    longest_s = _longest_s(pipeline, slowest)
    if slowest.way is None:
        return pipeline.train_s + max(all_s, longest_s / (1 + pipeline.max_staleness))
    down_s = max(
        one.way.occupied_s + one.way.delay_s + 3 * one.delay_s for one in pipeline.sites if one.way is not None
    )
    round_s = pipeline.train_s + down_s + max(longest_s, all_s if not pipeline.max_staleness else 0.0)
    return max(pipeline.train_s, all_s, round_s / (1 + pipeline.max_staleness))


def samples_per_s(pipeline: RolloutPipeline, site: DecodeSite) -> float:
    """Return what an engine decodes with all its slots busy; ages of sequences are those of a renewal process."""
    mean = sum(pipeline.lengths) / len(pipeline.lengths)
    squares = sum(one * one for one in pipeline.lengths) / len(pipeline.lengths)
    cached = site.slots * (pipeline.prompt_tokens + squares / (2 * mean))
    step_s = site.rates.step_s(site.slots, cached)
    prompts_s = site.slots * pipeline.prompt_tokens * site.rates.row_s
    return site.slots / (mean * step_s + prompts_s)


def _longest_s(pipeline: RolloutPipeline, site: DecodeSite) -> float:
    """Return what the longest response takes, with the engine half full."""
    longest, half = max(pipeline.lengths), -(-site.slots // 2)
    each_s = site.rates.step_s(half, half * (pipeline.prompt_tokens + longest / 2) / 2)
    return longest * each_s + pipeline.prompt_tokens * site.rates.row_s
