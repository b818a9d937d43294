"""The site agent: executes the server's orders, runs workers through an adapter, reports the site's state."""

from isthmus.agent.adapters.adapter import Adapter, WorkerStatus
from isthmus.agent.adapters.local import LocalAdapter
from isthmus.agent.service.daemon import AgentConfig, run_agent
from isthmus.agent.service.run_folders import LocalJobFile, submit_local

__all__ = [
    "Adapter",
    "AgentConfig",
    "LocalAdapter",
    "LocalJobFile",
    "WorkerStatus",
    "run_agent",
    "submit_local",
]
