"""`require_invited_size`: a site does not grow beyond what its owner was invited with."""

from __future__ import annotations

from isthmus.control.state.job_records import PoolState
from isthmus.core.errors import AuthError
from isthmus.core.pool import Cluster


def require_invited_size(state: PoolState, cluster: Cluster) -> None:
    """Raise `AuthError` if a cluster reports more chips than the latest invitation by which it has joined allows."""
    terms = [one for one in state.invitations.values() if one.joined == cluster.name]
    if not terms or terms[-1].max_chips is None:
        return
    num_chips = sum(group.num_chips for group in cluster.node_groups)
    if num_chips > terms[-1].max_chips:
        raise AuthError(
            f"cluster '{cluster.name}' has {num_chips} chips, and its invitation is for {terms[-1].max_chips} at most",
            hint=f"the operator allows more: isthmus site invite OWNER --cluster {cluster.name} --max-chips N",
        )
