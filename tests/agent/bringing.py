"""A site's cache with its fetcher, for tests: no server, and waits that do not wait."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from isthmus.agent.files.http_source import HttpReader
from isthmus.agent.files.site_storage import SiteStorage
from isthmus.agent.files.version_cache import VersionCache
from isthmus.agent.files.version_fetcher import VersionFetcher
from isthmus.agent.files.version_source import VersionSource
from isthmus.core.catalogue import CopyKey, FileManifest, HeldCopy, NeededVersion
from isthmus.core.errors import NotFoundError
from isthmus.core.network.address_rules import Resolve
from isthmus.core.owner.owner_policy import FetchPolicy
from isthmus.core.rights.storage_rules import StorageRules
from tests.agent.file_server import LOOPBACK

LOCAL = FetchPolicy(networks=(LOOPBACK,))


class Site:
    """A cache in `folder` that brings what `order` says; `manifests` are those that the server would send."""

    def __init__(
        self,
        folder: Path,
        policy: FetchPolicy = LOCAL,
        rules: StorageRules | None = None,
        resolve: Resolve | None = None,
    ) -> None:
        self.cache = VersionCache(folder, policy.cache_bytes)
        self.storage = SiteStorage(rules, None, self.cache)
        source = VersionSource(policy=policy, storage=self.storage, http=HttpReader(policy=policy, resolve=resolve))
        self.manifests: dict[CopyKey, FileManifest] = {}
        self.waits_s: list[float] = []
        self.fetcher = VersionFetcher(self.cache, source, self._manifest, wait=self.waits_s.append)

    def order(self, *needed: NeededVersion, dropped: Iterable[CopyKey] = ()) -> dict[str, HeldCopy]:
        """Order versions and wait until each has been brought or has failed; return the copies by version."""
        for _ in range(1 + len(needed)):
            self.fetcher.update(needed, list(dropped))
            assert self.fetcher.join(60)
        return {one.version: one for one in self.fetcher.copies()}

    def need(self, of: FileManifest, source: str, owner: str = "ann", name: str = "wiki") -> NeededVersion:
        """Return the order of a version that the server knows."""
        self.manifests[CopyKey(owner=owner, version=of.version)] = of
        return NeededVersion(
            owner=owner, version=of.version, kind="data", name=name, source=source, num_bytes=of.num_bytes
        )

    def tree(self, of: FileManifest, owner: str = "ann") -> dict[str, bytes]:
        """Return the files of a complete version by path."""
        folder = self.cache.place(CopyKey(owner=owner, version=of.version))
        return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}

    def _manifest(self, key: CopyKey) -> FileManifest:
        if key not in self.manifests:
            raise NotFoundError("no part needs it")
        return self.manifests[key]
