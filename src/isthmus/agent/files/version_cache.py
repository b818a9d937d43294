"""`VersionCache`: a site's copies of catalogue versions: each owner's apart, by content, up to a size limit.

    objects/OWNER/SHA256            a file, once for all versions of its owner that have it
    partial/OWNER/SHA256            the beginning of one
    versions/OWNER/VERSION/PATH     the files of a complete version: links to the objects

A version appears by a rename, once every object has passed its digest. Nothing is shared between owners: the digest
of another user's file gives no access to its content.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from isthmus.core.base_model import NAME_PATTERN
from isthmus.core.catalogue import CopyKey, FileManifest, HeldCopy, ManifestFile
from isthmus.core.errors import InputError, UnavailableError
from isthmus.core.messages.worker_folder import open_regular
from isthmus.core.units import format_bytes

_DIGEST = re.compile(r"[0-9a-f]{64}")
_BLOCK_BYTES = 1 << 20
_FOLDER_MODE, _FILE_MODE = 0o755, 0o444


class VersionCache:
    """The copies in `folder`, at most `max_bytes` of them. Its methods may be called by several threads."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self._max_bytes = Path(os.path.realpath(folder)), max_bytes
        self._lock = threading.Lock()
        # By version that is being brought: the bytes to come, and the digests of its files.
        self._reserved: dict[CopyKey, tuple[int, frozenset[str]]] = {}
        self._complete: dict[CopyKey, int] = {}
        for key in self._stored_keys():
            self._complete[key] = sum(size for _, size in _files(self._version_folder(key)))

    def place(self, key: CopyKey) -> Path:
        """Return the folder of a complete version, whether it is there or not."""
        return self._version_folder(key)

    def complete(self) -> dict[CopyKey, HeldCopy]:
        """Return the complete copies."""
        with self._lock:
            return {
                key: HeldCopy(owner=key.owner, version=key.version, num_bytes=num_bytes, complete=True)
                for key, num_bytes in self._complete.items()
            }

    def has(self, key: CopyKey) -> bool:
        """Return whether the version is complete."""
        with self._lock:
            return key in self._complete

    def present_bytes(self, key: CopyKey, manifest: FileManifest) -> int:
        """Return how many bytes of a version are here, partly fetched files included."""
        found = 0
        for file in {one.sha256: one for one in manifest.files}.values():
            size = _size(self._object(key, file))
            found += min(size if size is not None else _size(self._partial(key, file)) or 0, file.num_bytes)
        return found

    def reserve(self, key: CopyKey, manifest: FileManifest, used: Collection[CopyKey]) -> None:
        """Make room for a version; copies that are not in `used` are removed, the longest unused first.

        Raises `InputError` if it cannot fit.
        """
        with self._lock:
            digests = frozenset(one.sha256 for one in manifest.files)
            self._reserved[key] = max(0, manifest.num_bytes - self.present_bytes(key, manifest)), digests
            oldest = sorted(
                (one for one in self._complete if one not in used), key=lambda one: _used_ns(self._version_folder(one))
            )
            while (excess := self._used_bytes() + self._reserved_bytes() - self._max_bytes) > 0:
                if not oldest:
                    del self._reserved[key]
                    raise InputError(
                        f"version {key} of {format_bytes(manifest.num_bytes)} exceeds the cache of this site by "
                        f"{format_bytes(excess)}, with all that running jobs use",
                        hint="the site's owner sets fetch.cache_bytes of the policy",
                    )
                self._remove(oldest.pop(0))

    def release(self, key: CopyKey) -> None:
        """End a reservation."""
        with self._lock:
            self._reserved.pop(key, None)

    def missing(self, key: CopyKey, manifest: FileManifest) -> list[tuple[ManifestFile, int]]:
        """Return the files of a version that are not here yet, each content once, and how many bytes of it are."""
        unique = {one.sha256: one for one in manifest.files}.values()
        return [
            (one, min(_size(self._partial(key, one)) or 0, one.num_bytes))
            for one in unique
            if _size(self._object(key, one)) != one.num_bytes
        ]

    def write(self, key: CopyKey, file: ManifestFile, place: int, block: bytes) -> None:
        """Write a block of a file at its place; raise `InputError` for more bytes than the manifest lists."""
        if place + len(block) > file.num_bytes:
            self.discard(key, file)
            raise InputError(
                f"{file.path} has more than the {file.num_bytes} bytes of its manifest", hint="add the files again"
            )
        partial = self._partial(key, file)
        try:
            partial.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "r+b") as stream:
                stream.truncate(place)
                stream.seek(place)
                stream.write(block)
        except OSError as error:
            raise UnavailableError(f"cannot write {partial}: {error.strerror or error}") from error
        with self._lock:
            if key in self._reserved:
                to_come, digests = self._reserved[key]
                self._reserved[key] = max(0, to_come - len(block)), digests

    def finish(self, key: CopyKey, file: ManifestFile) -> bool:
        """Make a written file an object if it has its size and digest; otherwise remove it and return False."""
        partial, target = self._partial(key, file), self._object(key, file)
        if not file.num_bytes and not partial.exists():
            self.write(key, file, 0, b"")
        try:
            with open_regular(partial) as stream:
                digest = hashlib.sha256()
                while block := stream.read(_BLOCK_BYTES):
                    digest.update(block)
                is_whole = stream.tell() == file.num_bytes and digest.hexdigest() == file.sha256
                if is_whole:
                    os.fchmod(stream.fileno(), _FILE_MODE)
                    os.fsync(stream.fileno())
            if not is_whole:
                self.discard(key, file)
                return False
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            partial.replace(target)
        except FileNotFoundError:
            self.discard(key, file)
            return False
        except OSError as error:
            raise UnavailableError(f"cannot keep {partial}: {error.strerror or error}") from error
        return True

    def discard(self, key: CopyKey, file: ManifestFile) -> None:
        """Remove the beginning of a file."""
        self._partial(key, file).unlink(missing_ok=True)

    def publish(self, key: CopyKey, manifest: FileManifest) -> None:
        """Make a version whose objects are all here appear as a folder."""
        target = self._version_folder(key)
        building = target.with_name(f".{key.version}")
        try:
            shutil.rmtree(building, ignore_errors=True)
            for file in manifest.files:
                place = building / file.path
                place.parent.mkdir(parents=True, exist_ok=True, mode=_FOLDER_MODE)
                os.link(self._object(key, file), place)
            building.replace(target)
            _open_folders(target, self.folder)
        except OSError as error:
            raise UnavailableError(f"cannot make {target}: {error.strerror or error}") from error
        with self._lock:
            self._complete[key] = manifest.num_bytes
            self._reserved.pop(key, None)

    def touch(self, key: CopyKey) -> None:
        """Note that a version is in use."""
        with suppress(OSError):
            os.utime(self._version_folder(key))

    def drop(self, key: CopyKey) -> None:
        """Remove a copy."""
        with self._lock:
            self._remove(key)

    def holds(self, path: str) -> bool:
        """Return whether a place, with all links followed, is in the cache or contains it."""
        real = Path(os.path.realpath(path))
        return real.is_relative_to(self.folder) or self.folder.is_relative_to(real)

    def _remove(self, key: CopyKey) -> None:
        """Remove a version, and those of its owner's objects that no other version needs, complete or being fetched."""
        self._complete.pop(key, None)
        with suppress(OSError):
            shutil.rmtree(self._version_folder(key))
        for folder in (self.folder / "objects" / key.owner, self.folder / "partial" / key.owner):
            kept = {one for other, (_, files) in self._reserved.items() if other.owner == key.owner for one in files}
            for file in _entries(folder):
                with suppress(OSError):
                    if file.name not in kept and file.lstat().st_nlink == 1:
                        file.unlink()

    def _reserved_bytes(self) -> int:
        return sum(to_come for to_come, _ in self._reserved.values())

    def _used_bytes(self) -> int:
        """Return the bytes of all objects and beginnings of them."""
        roots = (self.folder / "objects", self.folder / "partial")
        return sum(size for root in roots for _, size in _files(root))

    def _stored_keys(self) -> Iterator[CopyKey]:
        for owner in _entries(self.folder / "versions"):
            for version in _entries(owner):
                if re.fullmatch(NAME_PATTERN, owner.name) and _DIGEST.fullmatch(version.name):
                    yield CopyKey(owner=owner.name, version=version.name)

    def _version_folder(self, key: CopyKey) -> Path:
        return self.folder / "versions" / key.owner / key.version

    def _object(self, key: CopyKey, file: ManifestFile) -> Path:
        return self.folder / "objects" / key.owner / file.sha256

    def _partial(self, key: CopyKey, file: ManifestFile) -> Path:
        return self.folder / "partial" / key.owner / file.sha256


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the regular files below a folder with their sizes."""
    for here, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                yield os.path.join(here, name), os.lstat(os.path.join(here, name)).st_size  # noqa: PTH118


def _size(file: Path) -> int | None:
    try:
        return file.lstat().st_size
    except OSError:
        return None


def _used_ns(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


def _open_folders(version: Path, cache: Path) -> None:
    """Let the accounts of workers enter a version's folder, and the folders above it without listing them."""
    for one in (cache, cache / "versions", version.parent):
        one.chmod(0o711)
    for here, _, _ in os.walk(version):
        Path(here).chmod(_FOLDER_MODE)
