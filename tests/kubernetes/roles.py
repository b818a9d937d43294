"""The rights that `deploy/kubernetes` grants, as the tests compare and apply them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy" / "kubernetes"


def documents(*folders: str) -> list[dict[str, Any]]:
    """Return the objects of some folders, in the order in which they can be applied."""
    found: list[dict[str, Any]] = []
    for folder in folders:
        kustomization = yaml.safe_load((DEPLOY / folder / "kustomization.yaml").read_text())
        for name in kustomization["resources"]:
            found += yaml.safe_load_all((DEPLOY / folder / name).read_text())
    return found


def granted(*folders: str) -> set[tuple[str, str, str, bool]]:
    """Return group, resource, verb and whether the right is one in the whole cluster."""
    return {
        (group, resource, verb, body["kind"] == "ClusterRole")
        for body in documents(*folders)
        for rule in body.get("rules", ())
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
