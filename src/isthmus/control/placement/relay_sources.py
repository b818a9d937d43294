"""`relay_sources`: from which clusters a cluster that decodes gets the weights, by the widths of the links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def relay_sources(
    holder: str, clusters: Iterable[str], widths_gbps: Mapping[tuple[str, str], float]
) -> dict[str, tuple[str, ...]]:
    """Return for each cluster those that pass weights on to it, the nearest first; none where `holder` is the nearest.

    The way of the weights to a cluster is the one whose narrowest link is the widest (Pollack, 1960), with the fewest
    clusters between. Behind the last cluster on it come the earlier ones with a wider link than the holder's.
    """
    left = dict.fromkeys(one for one in clusters if one != holder)
    ways: dict[str, tuple[float, tuple[str, ...]]] = {holder: (float("inf"), ())}
    found: dict[str, tuple[str, ...]] = {}
    while left:
        reached = [
            (min(width, widths_gbps[last, one]), -len(way), one, (*way, last))
            for last, (width, way) in ways.items()
            for one in left
            if (last, one) in widths_gbps
        ]
        if not reached:
            return found | dict.fromkeys(left, ())
        width, _, name, way = max(reached, key=lambda item: (item[0], item[1]))
        del left[name]
        ways[name] = width, way
        direct = widths_gbps.get((holder, name), 0.0)
        found[name] = tuple(one for one in reversed(way[1:]) if widths_gbps.get((one, name), 0.0) > direct)
    return found
