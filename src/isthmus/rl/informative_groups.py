"""`informative_groups`: which groups of samples have rewards that differ.

Source: dynamic sampling, section 3.2 of DAPO (arXiv 2503.14476): a group whose samples are all right, or all wrong, has
advantages of 0 and adds no gradient; its place in the batch goes to another prompt.
"""

from __future__ import annotations

import torch

from isthmus.rl.check_inputs import check_rewards


def informative_groups(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """Return [N / group] booleans: whether the rewards of a group differ; `rewards` [N] has groups side by side.

    Raises `InputError` for a group below 2, an N that is no multiple of it, and rewards that are not finite.
    """
    groups = check_rewards(rewards, group)
    return (groups != groups[:, :1]).any(dim=1)
