"""Rules of the resources of a pool: their text form, identity and equality."""

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import InputError
from isthmus.core.pool_resource import PoolResource

_names = st.text("aZ09._-", min_size=1, max_size=8)
_resources = st.one_of(
    st.builds(PoolResource.chips, _names, _names),
    st.builds(PoolResource.storage, _names),
    st.builds(PoolResource.link, _names, _names),
)


def test_the_text_form_is_the_one_of_bodies_and_messages():
    """`CLUSTER/GROUP`, `CLUSTER:storage`, `FROM>TO`, also inside a format string."""
    assert str(PoolResource.chips("A", "h20")) == "A/h20"
    assert str(PoolResource.storage("A")) == "A:storage"
    assert f"{PoolResource.link('A', 'B')}" == "A>B"


@given(_resources)
def test_parse_reverses_the_text_form(resource: PoolResource):
    """Every resource is read back from its text."""
    assert PoolResource.parse(str(resource)) == resource


@given(_resources, _resources)
def test_resources_are_equal_exactly_if_their_text_is(one: PoolResource, other: PoolResource):
    """No two resources share a text form, and equal ones have equal hashes."""
    assert (one == other) == (str(one) == str(other))
    assert one != other or hash(one) == hash(other)


@pytest.mark.parametrize("text", ["", "A", "A/", "/g", "A>", ">B", "A:disk", ":storage"])
def test_other_text_is_refused(text: str):
    """A text that names no resource raises, with the three forms as a hint."""
    with pytest.raises(InputError, match="CLUSTER:storage"):
        PoolResource.parse(text)


def test_a_resource_is_shared_and_survives_copies():
    """Equal resources are one instance in a process; a pickled or copied one is equal, not a plain tuple."""
    chips = PoolResource.chips("A", "g")
    assert chips is PoolResource.chips("A", "g")
    for other in (pickle.loads(pickle.dumps(chips)), copy.deepcopy(chips)):
        assert (other, type(other)) == (chips, PoolResource)
