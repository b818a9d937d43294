"""Rules of docs/architecture.md: it lists what exists, and says what the import contracts say."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "isthmus"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def _packages():
    inits = SOURCE.rglob("__init__.py")
    return sorted(".".join(init.parent.relative_to(SOURCE).parts) for init in inits if init.parent != SOURCE)


def _layers(contract):
    return [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]


def test_every_package_and_sub_package_is_listed_once():
    """In the tables, with a link to its `__init__`; a package that no longer exists is not listed."""
    rows = re.findall(r"^\| \[`([\w.]+)`\]\(\.\./src/isthmus/([\w/]+)/__init__\.py\) \|", PAGE, re.MULTILINE)
    assert sorted(name for name, _ in rows) == _packages()
    assert all(name.replace(".", "/") == path for name, path in rows)


def test_every_layer_order_is_that_of_its_contract():
    """Layers and their order, top to bottom, of each contract of type `layers`."""
    lines = re.findall(r"^- `(isthmus[\w.]*)`: ((?:.+\n(?!- )(?=  ))*.+)$", PAGE, re.MULTILINE)
    stated = {name: [re.findall(r"`([\w.]+)`", layer) for layer in text.split(">")] for name, text in lines}
    assert stated == {c["containers"][0]: _layers(c) for c in CONTRACTS if c["type"] == "layers"}


def test_every_package_and_every_folder_of_packages_has_its_own_contract():
    """One of type `layers` for each package, and for each folder below that holds others, which names all of these."""
    layered = {c["containers"][0]: {name for layer in _layers(c) for name in layer} for c in CONTRACTS if "layers" in c}
    packages = [f"isthmus.{package}" for package in _packages()]
    top = {package for package in packages if package.count(".") == 1}
    parents = {package.rpartition(".")[0] for package in packages}
    assert not (top | parents) - set(layered), "folders without a contract"
    named = [f"{parent}.{name}" for parent, names in layered.items() for name in names]
    missing = [p for p in packages if not any(name == p or name.startswith(f"{p}.") for name in named)]
    assert not missing, "sub-packages that the contract of their folder does not name"


def test_what_a_package_may_import_follows_from_the_contracts():
    """All packages of lower layers, less those that a contract forbids."""
    rows = re.findall(r"^\| \[`(\w+)`\]\(.*\) \| .* \| (.+) \|$", PAGE, re.MULTILINE)
    stated = {package: re.findall(r"`(\w+)`", allowed) for package, allowed in rows}
    layers = _layers(next(c for c in CONTRACTS if c.get("containers") == ["isthmus"]))
    expected = {}
    for depth, layer in enumerate(layers):
        for package in layer:
            forbidden = {
                name.removeprefix("isthmus.")
                for c in CONTRACTS
                if c["type"] == "forbidden" and f"isthmus.{package}" in c["source_modules"]
                for name in c["forbidden_modules"]
            }
            expected[package] = [name for lower in layers[depth + 1 :] for name in lower if name not in forbidden]
    assert stated == expected


def test_every_forbidden_contract_is_named():
    """The page states each contract of type `forbidden` by its name."""
    assert not [c["name"] for c in CONTRACTS if c["type"] == "forbidden" and f"| {c['name']} |" not in PAGE]
