"""`Job`, `Plan`, `OwnerPolicy`, `Pool` and `SiteFile` are versioned formats: files of every earlier version load.

The files in `formats/` are never edited: a format that grows gets another file beside them.
"""

from pathlib import Path

import pytest
import yaml

from isthmus.core.files.user_files import FILE_KINDS

FORMATS = Path(__file__).parent / "formats"


@pytest.mark.parametrize("file", sorted(FORMATS.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_file_of_an_earlier_version_loads_and_survives_a_round_trip(file):
    """What was written once is read today, and what is written today is read back the same."""
    kind = FILE_KINDS[file.stem.split("-")[0]]
    first = kind.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    again = kind.model_validate_json(first.model_dump_json(by_alias=True))
    assert again == first


def test_every_format_has_a_file_of_its_first_version():
    """A format without a kept file could change unnoticed."""
    kept = {"job-v1", "plan-v1", "policy-v1", "pool-v1", "site-v1", "stack-v1", "tariff-v1", "accounts-v1", "oidc-v1"}
    assert {file.stem for file in FORMATS.glob("*-v1.yaml")} == kept
