"""The site agent: executes the server's orders, runs workers through an adapter, reports the site's state."""

from isthmus.agent.adapters.adapter_kinds import check_scheduler
from isthmus.agent.adapters.local_adapter import LocalAdapter
from isthmus.agent.adapters.scheduler_adapter import SchedulerAdapter, WorkerStatus
from isthmus.agent.containers.image_tool import build_image
from isthmus.agent.containers.read_images import read_images
from isthmus.agent.containers.render_site import render_site
from isthmus.agent.containers.site_runtime import template_files
from isthmus.agent.service.agent_key import draw_key, read_key
from isthmus.agent.service.agent_loop import AgentConfig, run_agent
from isthmus.agent.service.agent_state_folder import LocalJobFile, submit_local_job
from isthmus.agent.service.part_table import held_devices
from isthmus.agent.service.remove_state_folder import remove_state_folder

__all__ = [
    "AgentConfig",
    "LocalAdapter",
    "LocalJobFile",
    "SchedulerAdapter",
    "WorkerStatus",
    "build_image",
    "check_scheduler",
    "draw_key",
    "held_devices",
    "read_images",
    "read_key",
    "remove_state_folder",
    "render_site",
    "run_agent",
    "submit_local_job",
    "template_files",
]
