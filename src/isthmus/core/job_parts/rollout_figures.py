"""`ROLLOUT_FIGURES`: metrics of jobs with `task: rl` that monitoring reads, and what each one is."""

from __future__ import annotations

ROLLOUT_FIGURES = {
    "reward": "Mean reward of the samples of the last step.",
    "validation_reward": "Mean reward of the most probable responses to held-out prompts.",
    "entropy": "Mean of minus the log-probability of sampled tokens, in nats.",
    "clipped_share": "Share of tokens whose ratio was clipped.",
    "kl_rollout": "Divergence of the trained policy from the policy that sampled, in nats a token.",
    "kl_reference": "Divergence of the policy from the first weights by k3, in nats a token.",
    "effective_samples": "Effective sample size of the tokens, as a share.",
    "staleness": "Versions between the one that sampled a token and the one that was trained, mean.",
    "response_tokens": "Mean tokens of a response.",
    "turns": "Mean turns of the model in a response.",
    "cut_share": "Share of responses of the largest length.",
    "filtered_groups": "Groups that were dropped for equal rewards before the last step.",
    "rollout_tokens_per_s": "Tokens decoded a second.",
    "decode_s": "Seconds of the last step in which a rank decoded.",
    "wait_samples_s": "Seconds of the last step without a sample to decode.",
    "wait_weights_s": "Seconds of the last step without complete weights.",
    "wait_link_s": "Seconds of the last step without a connection to the ledger.",
}
"""Metric name to help text."""
