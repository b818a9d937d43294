"""The site's agent: takes the server's orders, runs workers through an adapter, and reports what it has."""

from isthmus.agent.adapter import Adapter, WorkerStatus
from isthmus.agent.daemon import AgentConfig, run_agent
from isthmus.agent.folders import LocalJobFile, submit_local
from isthmus.agent.local import LocalAdapter

__all__ = [
    "Adapter",
    "AgentConfig",
    "LocalAdapter",
    "LocalJobFile",
    "WorkerStatus",
    "run_agent",
    "submit_local",
]
