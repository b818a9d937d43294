"""The limits of a worker's process at this machine: its account, the paths that it may use, its environment."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import pwd
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from isthmus.core.errors import InputError
from isthmus.core.messages.worker_folder import WorkerAccount, WorkerFolder, WorkerLimits, WorkerPaths, WorkerSpec
from isthmus.core.process.confined_start import MIN_LANDLOCK_ABI, landlock_abi
from isthmus.core.rights.storage_rules import AllowedStorage
from isthmus.core.rights.worker_rights import WorkerRights

_SYSTEM_FOLDERS = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt", "/nix", "/proc", "/sys",
    "/run/systemd/resolve",
)  # fmt: skip
"""What programs read on any machine."""

_DEVICES = "/dev"

INHERITED_VARIABLES = (
    "PATH", "LANG", "LANGUAGE", "TZ", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
    "LD_PRELOAD", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE",
    "HF_HUB_OFFLINE", "TMPDIR", "NO_PROXY", "no_proxy",
)  # fmt: skip
"""What a worker has of the environment of its machine, unless the name says that it is a secret."""

INHERITED_PREFIXES = (
    "LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_",
    "GLOO_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_", "ROCM_", "HIP_", "HSA_", "ROCR_", "RCCL_", "ASCEND_",
    "HCCL_", "UCX_", "FI_", "IB_", "TOKENIZERS_", "TRANSFORMERS_", "ISTHMUS_", "SLURM_", "COVERAGE_",
)  # fmt: skip
_SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "API_KEY", "ACCESS_KEY", "PRIVATE_KEY")

_SET_GROUPS = {"x86_64": 116, "aarch64": 159}
"""Number of the system call setgroups."""

_PUBLIC_NAMES = ("TOKENIZERS_PARALLELISM",)
"""A name with one of the words in it that is no secret."""


def allowed_variables(base: Mapping[str, str], named: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables of `base` that a worker gets: the usual ones and those `named` by the owner."""
    return {name: value for name, value in base.items() if name in named or _is_usual(name)}


def account_for(rights: WorkerRights, user: str) -> WorkerAccount | None:
    """Return the account that a worker of `user` runs as; None: the agent's own.

    Raises `InputError` if the policy names none for the user, or one that does not exist or is root.
    """
    if not rights.run_as:
        return None
    name = rights.account_of(user)
    if name is None:
        raise InputError(f"the owner has no account for jobs of user '{user}'", hint="ask the owner of the site")
    return _find_account(name, rights)


def check_rights(rights: WorkerRights) -> None:
    """Raise `InputError` if this agent cannot give its workers what the policy says."""
    accounts = [_find_account(name, rights) for name in sorted(set(rights.run_as.values()))]
    strange = [one.name for one in accounts if one.uid != os.geteuid()]
    if strange and os.geteuid() != 0:
        raise InputError(
            f"workers.run_as names {', '.join(strange)}, but the agent runs as uid {os.geteuid()}",
            hint="run the agent as root, or leave out run_as",
        )


def limits_for(
    folder: Path,
    rights: WorkerRights,
    user: str,
    storage: AllowedStorage | None,
    *,
    protected: Iterable[Path],
    also_read: Iterable[Path] = (),
) -> WorkerLimits:
    """Return the limits of the worker of `folder`, whose user may use `storage` (None: any path).

    `protected` are files and folders of the agent that no worker may read, except its own folder and `also_read`.
    """
    account, paths = account_for(rights, user), None
    if storage is not None and landlock_abi() >= MIN_LANDLOCK_ABI:
        local = [root for root in storage.roots if "://" not in root.path]
        writes = (_DEVICES, *(os.path.realpath(root.path) for root in local if root.access == "write"))
        hidden = [Path(os.path.realpath(one)) for one in protected]
        roots = _without((os.path.realpath(one.path) for one in local), hidden)
        paths = WorkerPaths(
            reads=(*host_folders(rights, hidden), *roots, *(os.path.realpath(one) for one in also_read)),
            writes=(*_without(writes, hidden), os.path.realpath(folder)),
        )
    return WorkerLimits(umask=rights.umask, account=account, paths=paths, environment=rights.environment)


def require_confined(spec: WorkerSpec, limits: WorkerLimits) -> None:
    """Raise `InputError` for a job with a program of the user's that could use all files of the agent."""
    rl = spec.job.rl
    what = "engine: command" if rl is None else "rl.function"
    runs_program = spec.job.engine == "command" if rl is None else bool(rl.function_files)
    if runs_program and limits.paths is None and limits.account is None:
        raise InputError(
            f"programs of users ({what}) would run as the agent's account with all its files",
            hint="the owner of the site names accounts (workers.run_as), or storage roots on a kernel with Landlock",
        )


def host_folders(rights: WorkerRights, protected: Iterable[Path]) -> Iterator[str]:
    """Yield what any worker may read: the system's folders, this interpreter's, and those that the owner names.

    `protected` files and folders are left out.
    """
    hidden = [Path(os.path.realpath(one)) for one in protected]
    yield from _without((*_SYSTEM_FOLDERS, *_interpreter_folders(), *rights.readable), hidden)


def act_as_user(rights: WorkerRights, user: str) -> None:
    """Give this thread, until it ends, the rights to files of the account that the jobs of `user` run as (Linux).

    The kernel keeps these rights by thread (setfsuid(2)). Raises `InputError` if the policy names no account.
    """
    account = account_for(rights, user)
    if account is None or account.uid == os.geteuid():
        return
    libc, set_groups = ctypes.CDLL(None), _SET_GROUPS.get(platform.machine())
    if set_groups is not None:  # the function of libc changes all threads
        libc.syscall(set_groups, len(account.groups), (ctypes.c_uint32 * len(account.groups))(*account.groups))
    libc.setfsgid(account.gid)
    libc.setfsuid(account.uid)
    if libc.setfsuid(-1) != account.uid:
        raise InputError(f"the agent cannot use files as account '{account.name}'", hint="run the agent as root")


def write_limits(folder: WorkerFolder, limits: WorkerLimits) -> None:
    """Write the limits of a worker, and open its folder to its account (see `open_to_account`)."""
    folder.write_limits(limits)
    open_to_account(folder, limits.account)


def open_to_account(folder: WorkerFolder, account: WorkerAccount | None) -> None:
    """Create the temporary folder of a worker, and open the worker's folder to its account.

    The folder stays the agent's and is sticky: the worker may create files there and cannot replace the agent's.
    """
    temporary = folder.path / TEMPORARY_FOLDER
    temporary.mkdir(mode=0o700, exist_ok=True)
    if account is None or account.uid == os.geteuid():
        return
    for file in folder.path.iterdir():
        if not file.is_dir() and file != folder.keys_path:  # which is for the account alone
            os.chown(file, -1, account.gid, follow_symlinks=False)
            file.chmod(0o640)
    os.chown(temporary, account.uid, account.gid)
    os.chown(folder.path, -1, account.gid)
    folder.path.chmod(0o3770)
    for parent in list(folder.path.parents)[:_NUM_STATE_PARENTS]:
        parent.chmod(parent.stat().st_mode & 0o7777 | 0o001)


TEMPORARY_FOLDER = "tmp"
"""Folder of a worker for its temporary files, in its own folder."""

_NUM_STATE_PARENTS = 4
"""Folders above a worker's that the agent has made: attempt, job, `runs`, and its state folder."""


def describe_isolation(rights: WorkerRights, *, has_roots: bool) -> str:
    """Return what holds workers at this machine, for the log."""
    uid, abi = os.geteuid(), landlock_abi()
    own = f"the agent's account (uid {uid}{', root: name accounts in workers.run_as' if uid == 0 else ''})"
    account = "accounts of their users" if rights.run_as else own
    if not has_roots:
        files = "files not limited beyond the account's rights: the policy has no storage roots"
    elif abi < MIN_LANDLOCK_ABI:
        files = "storage roots checked at the start; this kernel has no Landlock to hold workers to them"
    else:
        files = f"files held to the storage roots by Landlock (version {abi})"
    privileges = "no new privileges, " if sys.platform == "linux" else ""
    return f"workers run as {account}; {privileges}no core dumps, umask {rights.umask}; {files}"


def _find_account(name: str, rights: WorkerRights) -> WorkerAccount:
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        raise InputError(f"workers.run_as: this machine has no account '{name}'", hint="create it") from None
    if found.pw_uid == 0 and not rights.allow_root:
        raise InputError(f"workers.run_as: '{name}' is root", hint="name another account, or set allow_root: true")
    groups = tuple(os.getgrouplist(name, found.pw_gid))
    return WorkerAccount(name=name, uid=found.pw_uid, gid=found.pw_gid, groups=groups, home=found.pw_dir)


def _interpreter_folders() -> Iterator[str]:
    """Yield where this interpreter and its packages are, which are those of the workers."""
    for place in dict.fromkeys((sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path)):
        if place and Path(place).is_absolute():
            yield place
            yield os.path.realpath(place)


def _without(paths: Iterable[str], hidden: Sequence[Path]) -> Iterator[str]:
    """Yield `paths`; of one that contains a hidden place, all entries but those on the way to it."""
    for path in dict.fromkeys(paths):
        real = Path(os.path.realpath(path))
        inside = [one for one in hidden if one.is_relative_to(real)]
        if not inside:
            yield path
        elif real not in inside:
            with contextlib.suppress(OSError):
                yield from _without(sorted(map(str, real.iterdir())), inside)


def _is_usual(name: str) -> bool:
    if name not in _PUBLIC_NAMES and any(word in name.upper() for word in _SECRET_WORDS):
        return False
    return name in INHERITED_VARIABLES or name.startswith(INHERITED_PREFIXES)
