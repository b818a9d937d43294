"""Settings of Megatron Bridge's performance recipes, read from a copy of its repository without running them.

A recipe is a function that assigns literals to fields of a configuration and calls helpers that do; both are read from
the syntax tree, in order. What is no literal is left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from isthmus.core.plan_parts.activation_offload import ActivationOffload
from isthmus.core.plan_parts.expert_exchange import ExpertExchange
from isthmus.core.plan_parts.recompute_module import RecomputeModule
from isthmus.core.plan_parts.tensor_formats import TensorFormats

RECIPES = Path("src", "megatron", "bridge", "perf_recipes")
FIRST_RELEASE = (26, 6)
"""Tables of earlier releases were measured with other recipes, which the copy does not hold."""

_FAMILIES = {"llama3": "llama", "llama31": "llama", "qwen3": "qwen", "gpt": "gpt_oss", "deepseek": "deepseek"}
_DEGREES = {
    "TP": "model.tensor_model_parallel_size",
    "PP": "model.pipeline_model_parallel_size",
    "CP": "model.context_parallel_size",
    "VP": "model.virtual_pipeline_model_parallel_size",
    "EP": "model.expert_model_parallel_size",
    "GBS": "train.global_batch_size",
    "MBS": "train.micro_batch_size",
}
Settings = dict[str, Any]


def recipe_settings(folder: Path, name: str, counts: Mapping[str, int]) -> Settings | None:
    """Return the settings of the recipe `name`; None if there is none, or none with these degrees and batch sizes."""
    family = _FAMILIES.get(name.partition("_")[0])
    if family is None or not (folder / RECIPES / family).is_dir():
        return None
    functions = dict(_functions(folder / RECIPES, family))
    if name not in functions:
        return None
    found: Settings = {}
    _collect(functions[name], functions, found)
    same = all((found[path] or 1) == counts[key] for key, path in _DEGREES.items() if path in found)
    return found if same else None


def plan_fields(settings: Settings, layers_per_stage: int, *, experts: bool) -> dict[str, Any]:
    """Return the fields of a plan that a recipe's settings mean; `experts`: of a model that has some."""
    fields: dict[str, Any] = {}
    modules = tuple(one for one in settings.get("model.recompute_modules") or () if one in get_args(RecomputeModule))
    if settings.get("model.recompute_granularity") == "full":
        count = settings.get("model.recompute_num_layers") or layers_per_stage
        fields |= {"recompute": "full", "recompute_layers": min(count, layers_per_stage)}
    elif modules:
        fields |= {"recompute": "selective", "recompute_modules": modules}
    if settings.get("model.cpu_offloading") and settings.get("model.cpu_offloading_num_layers"):
        fields["offload"] = ActivationOffload(layers=settings["model.cpu_offloading_num_layers"])
    if experts:
        flexible = settings.get("model.moe_token_dispatcher_type") == "flex"
        fields["experts"] = ExpertExchange(
            dispatcher="deepep" if flexible else "all_to_all",
            overlap=bool(settings.get("comm_overlap.overlap_moe_expert_parallel_comm")),
        )
    if settings.get("ddp.grad_reduce_in_fp32") is False:
        fields["formats"] = TensorFormats(gradients="bf16")
    return fields


def _functions(recipes: Path, family: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    files = (recipes / "_common.py", recipes / family / "common.py", *sorted((recipes / family).glob("*/*.py")))
    for file in files:
        if file.is_file():
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef):
                    yield node.name, node


def _collect(function: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef], found: Settings) -> None:
    """Add what `function` assigns to `found`, helpers included; later assignments replace earlier ones."""
    for statement in function.body:
        if isinstance(statement, ast.Assign):
            _assign(statement, found)
        for call in ast.walk(statement):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in functions:
                _collect(functions[call.func.id], functions, found)


def _assign(statement: ast.Assign, found: Settings) -> None:
    value: Any = statement.value
    for target in statement.targets:
        path = ast.unparse(target)
        if not path.startswith("cfg."):
            continue
        if isinstance(value, ast.Call):
            named = {one.arg: one.value for one in value.keywords if one.arg}
            found |= {f"{path[4:]}.{key}": one.value for key, one in named.items() if isinstance(one, ast.Constant)}
            continue
        try:
            found[path[4:]] = ast.literal_eval(value)
        except ValueError:
            continue
