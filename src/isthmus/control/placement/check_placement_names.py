"""Check that the names in a job's placement exist: a job with a typo would wait forever."""

from __future__ import annotations

from isthmus.core.chip import chip_catalogue
from isthmus.core.errors import InputError
from isthmus.core.files.validation_errors import suggest_name
from isthmus.core.job import PlacementConstraints
from isthmus.core.pool import Cluster, Pool


def check_placement_names(placement: PlacementConstraints, joined: tuple[Cluster, ...], file: Pool | None) -> None:
    """Raise `InputError` for a cluster, owner, region or chip that is in neither the pool file nor a report.

    `joined` are the clusters whose agents ever reported. While no cluster is known, any name is valid.
    """
    clusters = (*joined, *(file.clusters if file else ()))
    if not clusters:
        return
    owners = {cluster.owner for cluster in clusters} | {owner.name for owner in (file.owners if file else ())}
    chips = set(chip_catalogue()) | {chip.name for chip in (file.chips if file else ())}
    _check("clusters", placement.clusters, {cluster.name for cluster in clusters})
    _check("owners", placement.owners, owners)
    regions = {cluster.region for cluster in clusters if cluster.region}
    _check("chips", placement.chips, chips)
    _check("regions", placement.regions, regions)
    _check("data_owners", placement.data_owners, owners)
    _check("data_regions", placement.data_regions, regions)


def check_output_site(site: str, joined: tuple[Cluster, ...], file: Pool | None) -> None:
    """Raise `InputError` for an `output_site` that is in neither the pool file nor a report, with the nearest name.

    `joined` are the clusters whose agents ever reported. While no cluster is known, any name is valid.
    """
    known = {cluster.name for cluster in (*joined, *(file.clusters if file else ()))}
    if known and site not in known:
        raise InputError(f"output_site: the pool has no site '{site}'", hint=suggest_name(site, sorted(known)))


def check_owner_name(name: str, joined: tuple[Cluster, ...], file: Pool | None) -> None:
    """Raise `InputError` for an owner that neither the pool file nor a report has.

    Without a pool file, or with one that lists links only, any name is valid: owners join with their agents.
    """
    if file is None or not (file.owners or file.clusters):
        return
    owners = {owner.name for owner in file.owners} | {one.owner for one in (*file.clusters, *joined)}
    if name not in owners:
        known = suggest_name(name, sorted(owners))
        hint = f"{known}; a new owner is added to the server's pool file first" if known else None
        raise InputError(f"the pool has no owner '{name}'", hint=hint or "add it to the server's pool file first")


def _check(field: str, wanted: tuple[str, ...], known: set[str]) -> None:
    for name in wanted:
        if name not in known:
            raise InputError(f"placement.{field}: the pool has no '{name}'", hint=suggest_name(name, sorted(known)))
