"""Numbers among the options of `site.yaml`: what is none is an error of the file that names the option."""

from __future__ import annotations

import pytest

from isthmus.agent.adapters.site_options import number_option
from isthmus.core.errors import InputError
from isthmus.core.owner.site_file import SiteFile


@pytest.mark.parametrize("value", ["fast", "", True, -1, 11, "1e999", "nan", "0x1"])
def test_what_is_no_number_in_bounds_is_an_error_that_names_the_option(value: object) -> None:
    """Also what `float` takes and no one means."""
    with pytest.raises(InputError, match=r"options.port: .* is no number from 0 to 10"):
        number_option(SiteFile(kind="k", options={"port": value}), "port", 0, most=10)


def test_a_number_may_be_written_as_text_and_a_whole_one_has_no_fraction() -> None:
    """As YAML has them; without the option the default."""
    file = SiteFile(kind="k", options={"a": "7", "b": 7.5})
    assert [number_option(file, name, 3) for name in ("a", "b", "c")] == [7, 7.5, 3]
    with pytest.raises(InputError, match="whole number"):
        number_option(file, "b", 3, whole=True)
