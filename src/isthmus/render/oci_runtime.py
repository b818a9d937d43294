"""`oci_config`: the `config.json` with which an OCI runtime such as `runc` runs one worker of a rendered part.

Source: OCI runtime specification 1.0.2, https://github.com/opencontainers/runtime-spec. The container shares the
network of its node and has its own processes, mounts and message queues; it sees its mounts and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from isthmus.render.render_part import RenderedPart

_CPU_PERIOD_US = 100_000
_CORE_SHARES = 1024
"""Weight of a core against others' programs; that of one process outside containers."""

_NAMESPACES = ("pid", "ipc", "uts", "mount", "cgroup")
_MASKED = ("/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list", "/proc/sched_debug", "/proc/scsi",
           "/sys/firmware")  # fmt: skip
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
_MAX_PROCESSES = 4096
_NUM_SHARED_MEMORY_SHARES = 2
"""The container's shared memory may take this part of its memory, as Linux gives a machine's."""

_UNLIMITED_SHARED_MEMORY = "size=50%"


@dataclass(frozen=True)
class ContainerUser:
    """The account inside the container, with the umask of its files."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    umask: int = 0o077


@dataclass(frozen=True)
class Container:
    """One worker's container: the image's root folder, the program, and the folder that the program may write."""

    root: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    working_folder: str
    user: ContainerUser
    mounts: Mapping[str, tuple[str, bool]]
    cgroup: str = ""


def oci_config(part: RenderedPart, container: Container) -> dict[str, object]:
    """Return the configuration of `container` with the limits of `part`.

    No capability, no new privileges, a read-only root; CPU time and memory are limited by control groups.
    """
    user = container.user
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": user.uid, "gid": user.gid, "additionalGids": list(user.groups), "umask": user.umask},
            "args": list(container.command),
            "env": [f"{name}={value}" for name, value in container.environment.items()],
            "cwd": container.working_folder,
            "capabilities": {kind: [] for kind in ("bounding", "effective", "inheritable", "permitted", "ambient")},
            "rlimits": [{"type": "RLIMIT_CORE", "hard": 0, "soft": 0}],
            "noNewPrivileges": True,
        },
        "root": {"path": container.root, "readonly": True},
        "hostname": "worker",
        "mounts": [*_system_mounts(part), *_bind_mounts({**part.mounts, **container.mounts})],
        "linux": {
            "cgroupsPath": container.cgroup,
            "namespaces": [{"type": kind} for kind in _NAMESPACES],
            "resources": _resources(part),
            "maskedPaths": list(_MASKED),
            "readonlyPaths": list(_READ_ONLY),
        },
    }


def _system_mounts(part: RenderedPart) -> list[dict[str, object]]:
    limit = part.memory_bytes
    size = _UNLIMITED_SHARED_MEMORY if limit is None else f"size={limit // _NUM_SHARED_MEMORY_SHARES}"
    safe = ["nosuid", "noexec", "nodev"]
    shared = [*safe, "mode=1777", size]
    pts = [*safe[:2], "newinstance", "ptmxmode=0666", "mode=0620"]
    return [
        {"destination": "/proc", "type": "proc", "source": "proc", "options": safe},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=65536k"]},
        {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": pts},
        {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": shared},  # noqa: S108
        {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue", "options": safe},
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": [*safe, "ro"]},
        {"destination": "/tmp", "type": "tmpfs", "source": "tmp", "options": shared},  # noqa: S108 - its own
    ]


def _bind_mounts(places: Mapping[str, tuple[str, bool]]) -> list[dict[str, object]]:
    """Return the mounts in the order of their paths, so that one inside another comes after it."""
    return [
        {
            "destination": place,
            "type": "bind",
            "source": source,
            "options": ["rbind", "nosuid", "nodev", "rw" if writable else "ro"],
        }
        for place, (source, writable) in sorted(places.items())
    ]


def _resources(part: RenderedPart) -> dict[str, object]:
    limits: dict[str, object] = {
        "devices": [{"allow": False, "access": "rwm"}],
        "pids": {"limit": _MAX_PROCESSES},
    }
    if part.memory_bytes is not None:
        limits["memory"] = {"limit": part.memory_bytes, "swap": part.memory_bytes}
    if part.cpu_cores is not None:
        quota = max(int(part.cpu_cores * _CPU_PERIOD_US), 1000)
        shares = max(int(part.cpu_cores * _CORE_SHARES), _CORE_SHARES)
        limits["cpu"] = {"quota": quota, "period": _CPU_PERIOD_US, "shares": shares}
    return limits
