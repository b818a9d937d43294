"""Numbers among the options of `site.yaml`: what is none is an error of the file that names the option."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.agent.adapters.adapter_kinds import SiteContext, make_adapter
from isthmus.agent.adapters.site_options import number_option
from isthmus.core.errors import InputError
from isthmus.core.owner.site_file import SiteFile
from isthmus.core.pool import Cluster, NodeGroup


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


@pytest.mark.parametrize(
    ("selector", "field"),
    [({"partition": "p"}, "partition"), ({"labels": {"a": "b"}}, "labels"), ({"resource": "gpu"}, "resource")],
)
def test_a_local_site_refuses_what_it_would_ignore(selector: dict[str, object], field: str, tmp_path: Path) -> None:
    """It has neither partitions nor labels, and its cards are those of `pool.yaml`."""
    group = NodeGroup(name="h20", chip="H20", nodes=1, chips_per_node=1)
    file = SiteFile.model_validate({"kind": "local", "node_groups": {"h20": selector}})
    context = SiteContext(site=file, cluster=Cluster(name="a", owner="o", node_groups=(group,)), state=tmp_path)
    with pytest.raises(InputError, match=f"node_groups.h20.{field}: a site of kind 'local' has no {field}"):
        make_adapter(context)
