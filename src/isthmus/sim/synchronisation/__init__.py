"""The time of one synchronisation of gradients or parameters by a named strategy, and what binds it."""

from isthmus.sim.synchronisation.paper_equations import (
    NetworkTime,
    parameter_server_network,
    parameter_server_s,
    passing_s,
    psring_network,
    psring_s,
    reduce_scatter_s,
)
from isthmus.sim.synchronisation.step_loads import StageOfPhases, step_loads
from isthmus.sim.synchronisation.sync_cluster import SyncCluster
from isthmus.sim.synchronisation.sync_seconds import BindingEnd, PhaseTime, SyncTime
from isthmus.sim.synchronisation.sync_seconds import sync_seconds as seconds
from isthmus.sim.synchronisation.sync_servers import SyncServers

__all__ = [
    "BindingEnd",
    "NetworkTime",
    "PhaseTime",
    "StageOfPhases",
    "SyncCluster",
    "SyncServers",
    "SyncTime",
    "parameter_server_network",
    "parameter_server_s",
    "passing_s",
    "psring_network",
    "psring_s",
    "reduce_scatter_s",
    "seconds",
    "step_loads",
]
