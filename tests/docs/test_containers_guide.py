"""Each file of the guide on containers is read by the code that reads it at a site."""

from __future__ import annotations

import pytest
import yaml
from pydantic import BaseModel

from isthmus.core.job_parts.runtime_choice import RuntimeChoice
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.pool import NodeGroup
from isthmus.render import ImageFacts, Template
from tests.docs.follow_guide import ROOT, blocks

PAGE = ROOT / "docs" / "guide" / "containers.md"
FILES = [yaml.safe_load(block.text) for block in blocks(PAGE) if block.language == "yaml"]
FORMS: list[type[BaseModel]] = [ImageFacts, RuntimeChoice, OwnerPolicy, NodeGroup, Template]


@pytest.mark.parametrize(("document", "form"), list(zip(FILES, FORMS, strict=True)))
def test_file_of_the_guide_is_read(document: dict, form: type[BaseModel]) -> None:
    only = next(iter(document.values()))
    inner = {RuntimeChoice: document.get("runtime"), NodeGroup: only[0] if isinstance(only, list) else None}
    form.model_validate(inner.get(form) or document)
