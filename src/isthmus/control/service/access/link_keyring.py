"""`LinkKeyring`: the keys of the links of each attempt, and of each job's copies, derived from one secret of the store.

A key is HKDF-SHA256 (H. Krawczyk, P. Eronen, RFC 5869) of the secret over job, attempt and a pair of sites, or over the
job for its copies in an object store. Each server of a store derives the same keys, and none of them is stored.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from isthmus.control.store.store_interface import Store
from isthmus.core.messages.agent_messages import PartOrder, RunKeys
from isthmus.core.messages.switch_keys import job_number, job_switch_key

SECRET_NAME = "links"  # noqa: S105 (its name, not the secret)
KEY_BYTES = 32


class LinkKeyring:
    """Derives keys from the secret of `store`, which is read at first use, and those for switches from `switch_secret`.

    Without a `switch_secret`, switches of the pool have no keys: they listen on loopback only.
    """

    def __init__(self, store: Store, switch_secret: bytes | None = None) -> None:
        self._store, self._switch_secret = store, switch_secret

    @functools.cached_property
    def _secret(self) -> bytes:
        return self._store.secret(SECRET_NAME)

    def run_keys(self, order: PartOrder, site: str) -> RunKeys | None:
        """Return the keys of the part of `order` at `site`; None for an order without a plan."""
        if order.plan is None:
            return None
        links = self._keys(order.job, order.attempt, site, order.plan.clusters)
        has_copies = order.spec is not None and order.spec.checkpoints.copy_store is not None
        copies = self._derive("isthmus copies key", order.job) if has_copies else None
        switch = self._switch_key(order.job) if order.switches else None
        return RunKeys(job=order.job, attempt=order.attempt, keys=links, copies=copies, switch=switch)

    def _switch_key(self, job: str) -> str | None:
        return None if self._switch_secret is None else job_switch_key(self._switch_secret, job_number(job)).hex()

    def _keys(self, job: str, attempt: int, site: str, sites: Iterable[str]) -> dict[str, str]:
        return {other: self._derive("isthmus link key", job, attempt, *sorted((site, other))) for other in sites}

    def _derive(self, *what: str | int) -> str:
        info = json.dumps(what).encode()
        return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(self._secret).hex()
