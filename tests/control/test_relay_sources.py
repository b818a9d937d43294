"""Rules of the ways of weights to clusters that decode."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from isthmus.control.placement.relay_sources import relay_sources


def test_weights_go_over_the_widest_links() -> None:
    """A cluster behind a thin link gets them from its neighbours, the nearest first; equal links are not relayed."""
    widths = {("a", "b"): 0.4, ("b", "c"): 0.4, ("a", "c"): 0.1, ("c", "d"): 0.3, ("b", "d"): 0.2, ("a", "d"): 0.1}
    assert relay_sources("a", "bcd", widths) == {"b": (), "c": ("b",), "d": ("c", "b")}
    even = {(one, other): 0.2 for one in "abcd" for other in "abcd" if one != other}
    assert relay_sources("a", "bcd", even) == {"b": (), "c": (), "d": ()}
    assert relay_sources("a", "abz", widths) == {"b": (), "z": ()}


@given(st.dictionaries(st.tuples(*[st.sampled_from("abcdefg")] * 2), st.floats(0.01, 10.0)))
def test_no_cluster_is_its_own_source(widths: dict[tuple[str, str], float]) -> None:
    """Over any links: the first sources lead to the holder, and each is over a wider link than the holder's."""
    found = relay_sources("a", "bcdefg", widths)
    assert found.keys() == set("bcdefg")
    for name, sources in found.items():
        assert all(widths[one, name] > widths.get(("a", name), 0.0) for one in sources)
        seen = {name}
        while sources:
            assert sources[0] not in seen
            seen.add(sources[0])
            sources = found[sources[0]]
