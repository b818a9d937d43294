"""The site machine: a pure state machine for a site's parts, driven by agents and by the pool simulator."""

from isthmus.site.checkpoint_protection import awaits_checkpoint
from isthmus.site.devices.device_allocator import DeviceAllocator
from isthmus.site.devices.device_count_allocator import DeviceCountAllocator
from isthmus.site.devices.device_id_allocator import DeviceIdAllocator
from isthmus.site.devices.make_allocator import make_allocator
from isthmus.site.devices.topology_allocator import TopologyAllocator
from isthmus.site.machine import SiteMachine
from isthmus.site.machine_events import (
    FetchFiles,
    FetchObserved,
    ForeignPart,
    HoldObserved,
    HoursObserved,
    InventoryObserved,
    LocalJob,
    LocalJobsObserved,
    LocalJobSubmitted,
    LocalJobWithdrawn,
    LogWarning,
    ObservedWorker,
    OrdersReceived,
    PathObserved,
    ProbeObserved,
    QueueObserved,
    RenewRunLease,
    ReorderQueue,
    ReportLocalExit,
    RequestCheckpoint,
    ShutdownRequested,
    SiteEvent,
    SiteInstruction,
    StartWorker,
    StopWorker,
    WorkersObserved,
    WriteRankMap,
)
from isthmus.site.parts import CLAIMING, HOLDING, PartKey, SitePart, SitePartState, SiteWorker
from isthmus.site.scheduler.network_paths import outgoing_kbps
from isthmus.site.scheduler.scheduler_holds import victim_name
from isthmus.site.site_invariants import check_site
from isthmus.site.site_report import UNSAVED_STEP_S
from isthmus.site.topology.explain_part import SitePlacement, explain_part
from isthmus.site.topology.tree_of_group import node_names

__all__ = [
    "CLAIMING",
    "HOLDING",
    "UNSAVED_STEP_S",
    "DeviceAllocator",
    "DeviceCountAllocator",
    "DeviceIdAllocator",
    "FetchFiles",
    "FetchObserved",
    "ForeignPart",
    "HoldObserved",
    "HoursObserved",
    "InventoryObserved",
    "LocalJob",
    "LocalJobSubmitted",
    "LocalJobWithdrawn",
    "LocalJobsObserved",
    "LogWarning",
    "ObservedWorker",
    "OrdersReceived",
    "PartKey",
    "PathObserved",
    "ProbeObserved",
    "QueueObserved",
    "RenewRunLease",
    "ReorderQueue",
    "ReportLocalExit",
    "RequestCheckpoint",
    "ShutdownRequested",
    "SiteEvent",
    "SiteInstruction",
    "SiteMachine",
    "SitePart",
    "SitePartState",
    "SitePlacement",
    "SiteWorker",
    "StartWorker",
    "StopWorker",
    "TopologyAllocator",
    "WorkersObserved",
    "WriteRankMap",
    "awaits_checkpoint",
    "check_site",
    "explain_part",
    "make_allocator",
    "node_names",
    "outgoing_kbps",
    "victim_name",
]
