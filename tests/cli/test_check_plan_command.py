"""`isthmus check PLAN --model --pool` and `simulate` refuse a plan that no chips can run."""

import json

import pytest
import yaml

from isthmus.cli import main
from isthmus.core.errors import InputError, PlanError

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 512, "vocab_size": 256,
}  # fmt: skip
POOL = {
    "clusters": [{"name": "a", "owner": "o", "node_groups": [{"chip": "H100", "nodes": 1, "chips_per_node": 8}]}],
}


@pytest.fixture
def files(tmp_path):
    """Return a function that writes a plan with `tp`, beside its model and pool, and returns the paths."""

    def write(tp: int) -> dict[str, str]:
        stage = {"cluster": "a", "node_group": "h100", "layers": [0, 4], "tp": tp}
        sizes = {"micro_batches": 1, "micro_batch_size": 1, "sequence_length": 128}
        documents = {"config.json": CONFIG, "pool.yaml": POOL, "plan.yaml": {"id": "p", "stages": [stage]} | sizes}
        for name, document in documents.items():
            text = json.dumps(document) if name.endswith("json") else yaml.safe_dump(document)
            (tmp_path / name).write_text(text, encoding="utf-8")
        return {name.partition(".")[0]: str(tmp_path / name) for name in documents}

    return write


@pytest.mark.parametrize("words", [["check"], ["simulate"]])
def test_tensor_parallelism_that_heads_do_not_divide_is_refused(files, words, capsys):
    """Both commands end with the exit code of plans and name the nearest degree."""
    at = files(3)
    assert main([*words, at["plan"], "--model", at["config"], "--pool", at["pool"]]) == PlanError.exit_code
    shown = capsys.readouterr().err
    assert "tp 3 does not divide the 8 attention heads" in shown
    assert "nearest valid: tp 2" in shown


def test_a_possible_plan_passes_and_files_of_other_kinds_take_no_model(files, capsys):
    """`--model` and `--pool` belong to plans."""
    at = files(4)
    assert main(["check", at["plan"], "--model", at["config"], "--pool", at["pool"]]) == 0
    assert main(["check", at["pool"], "--model", at["config"]]) == InputError.exit_code
    assert "--model and --pool are for plans" in capsys.readouterr().err
