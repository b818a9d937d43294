"""Rules of weights on disk: we read what others publish, and others read what we write."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from isthmus.core.errors import ModelError, UnavailableError
from isthmus.data import export_tokenizer
from isthmus.train.model.save_weights import check_output, export_shard, finish_export
from isthmus.train.model.stage_model import StageModel, build_stage
from tests.train.small_models import NUM_LAYERS, VARIANTS, save_model, token_ids, write_config

INDEX = "model.safetensors.index.json"
any_variant = pytest.mark.parametrize("variant", VARIANTS)
any_cut = pytest.mark.parametrize("bounds", [[0, NUM_LAYERS], [0, 1, 3, NUM_LAYERS]], ids=["whole", "cut"])


def load(folder: Path, layers: tuple[int, int] = (0, NUM_LAYERS)) -> StageModel:
    return build_stage(folder, layers, dtype=torch.float32, device="cpu", seed=0, weights="load")


def export(source: Path, output: Path, bounds: list[int], **options) -> None:
    for rank, layers in enumerate(pairwise(bounds)):
        export_shard(load(source, layers), output, rank, **options)
    finish_export(output, source, len(bounds) - 1)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def logits(folder: Path) -> torch.Tensor:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        return model(token_ids()).logits


@pytest.mark.slow
@any_variant
@any_cut
def test_an_exported_folder_is_what_transformers_would_have_saved(tmp_path, variant, bounds):
    """The export of loaded weights has the names, values and logits of where they came from, each once."""
    source, output = tmp_path / "source", tmp_path / "output"
    save_model(source, variant)
    export(source, output, bounds)
    published = tensors(source)
    files = sorted(output.glob("*.safetensors"))
    assert len(files) == len(bounds) - 1
    written = [name for file in files for name in load_file(file)]
    assert sorted(written) == sorted(published)
    assert all(torch.equal(value, published[name]) for name, value in tensors(output).items())
    assert torch.equal(logits(output), logits(source))


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("mixtral", "model.layers.0.block_sparse_moe.experts.0.w1.weight"),
        ("mixtral", "model.layers.3.block_sparse_moe.gate.weight"),
        ("qwen3-moe", "model.layers.0.mlp.experts.3.gate_proj.weight"),
        ("qwen3-moe", "model.layers.1.mlp.gate_proj.weight"),
        ("qwen3-moe", "model.layers.2.mlp.gate.weight"),
    ],
)
def test_experts_are_written_one_by_one(tmp_path, variant, name):
    """The index has the published names of experts and routers, which other tools read."""
    save_model(tmp_path / "source", variant)
    export(tmp_path / "source", tmp_path / "output", [0, 2, NUM_LAYERS])
    weight_map = json.loads((tmp_path / "output" / INDEX).read_text())["weight_map"]
    assert name in weight_map
    assert not any("gate_up_proj" in known for known in weight_map)


@pytest.mark.parametrize("variant", ["mixtral", "qwen3-moe", "qwen3-tied-window"])
def test_the_fused_layout_is_read_too(tmp_path, variant):
    """A folder that keeps transformers' 3-D experts, in several files, loads to the same parameters."""
    model = save_model(tmp_path / "published", variant)
    model.save_pretrained(tmp_path / "fused", save_original_format=False, max_shard_size="8KB")
    assert (tmp_path / "fused" / INDEX).exists()
    published, fused = (dict(load(tmp_path / name).global_named_parameters()) for name in ("published", "fused"))
    assert published.keys() == fused.keys()
    assert all(torch.equal(published[name], fused[name]) for name in published)


def test_a_stage_opens_only_the_files_of_its_own_tensors(tmp_path):
    """A worker whose folder lacks the other stages' files still loads."""
    model = save_model(tmp_path / "source", "qwen3")
    model.save_pretrained(tmp_path / "files", max_shard_size="3KB")
    weight_map = json.loads((tmp_path / "files" / INDEX).read_text())["weight_map"]
    own = {file for name, file in weight_map.items() if name.startswith("model.layers.1.")}
    for file in set(weight_map.values()) - own:
        (tmp_path / "files" / file).unlink()
    load(tmp_path / "files", (1, 2))
    with pytest.raises(ModelError, match="cannot be read"):
        load(tmp_path / "files", (2, 3))


def test_a_tied_model_may_store_the_embedding_as_the_head(tmp_path):
    """Some tied checkpoints hold `lm_head.weight` alone; both ends read it."""
    save_model(tmp_path, "llama-tied")
    stored = load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")
    save_file(stored, tmp_path / "model.safetensors")
    for layers in ((0, 1), (3, 4)):
        loaded = dict(load(tmp_path, layers).global_named_parameters())
        assert torch.equal(loaded["model.embed_tokens.weight"], stored["lm_head.weight"])


@pytest.mark.parametrize("variant", ["mixtral", "qwen3"])
def test_a_missing_tensor_is_named(tmp_path, variant):
    """Without one tensor the error names it and the folder; a stage that does not need it loads."""
    save_model(tmp_path, variant)
    stored = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in sorted(stored, reverse=True) if name.startswith("model.layers.2."))
    del stored[gone]
    save_file(stored, tmp_path / "model.safetensors")
    load(tmp_path, (0, 2))
    with pytest.raises(ModelError) as caught:
        load(tmp_path, (2, 3))
    assert gone in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_misshapen_tensor_is_named(tmp_path):
    """A tensor of another shape than config.json says is refused with both shapes, its name and its file."""
    save_model(tmp_path, "llama")
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.layers.1.mlp.up_proj.weight"] = torch.zeros(24, 15)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"up_proj\.weight' has shape \[24, 15\], config\.json says \[24, 16\]"):
        load(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path):
    """Loading from a bare config.json says what is missing and what to do."""
    with pytest.raises(ModelError, match="neither") as caught:
        load(write_config(tmp_path, "llama"))
    assert "pretrain" in caught.value.hint


@pytest.mark.parametrize("content", [b"", b"\x10\0\0\0\0\0\0\0not a header"])
def test_a_damaged_file_is_named(tmp_path, content):
    """A file that is cut short or no safetensors file at all is a `ModelError` that names it."""
    save_model(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"weight_map": 3}'])
def test_a_damaged_index_is_named(tmp_path, content):
    """An index that is no JSON, or no index, is a `ModelError` that names it."""
    write_config(tmp_path, "llama")
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ModelError, match=r"index\.json"):
        load(tmp_path)


def test_the_dtype_asked_for_is_written_and_recorded(tmp_path):
    """fp32 masters exported as bf16 are bf16 in the files and in config.json, and load as such."""
    save_model(tmp_path / "source", "mixtral-tied-window")
    export(tmp_path / "source", tmp_path / "output", [0, 2, NUM_LAYERS], dtype=torch.bfloat16)
    assert {value.dtype for value in tensors(tmp_path / "output").values()} == {torch.bfloat16}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "output")
    assert model.dtype == torch.bfloat16
    assert json.loads((tmp_path / "output" / "config.json").read_text())["dtype"] == "bfloat16"


def test_large_stages_are_written_in_several_files(tmp_path):
    """No file grows beyond the limit by more than a tensor, and together they are the model."""
    save_model(tmp_path / "source", "mixtral")
    export(tmp_path / "source", tmp_path / "output", [0, 2, NUM_LAYERS], shard_bytes=20_000)
    files = sorted(tmp_path.glob("output/*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    total = json.loads((tmp_path / "output" / INDEX).read_text())["metadata"]["total_size"]
    assert total == sum(value.nbytes for value in tensors(tmp_path / "output").values())
    assert torch.equal(logits(tmp_path / "output"), logits(tmp_path / "source"))


def test_the_tokenizer_of_the_run_and_generation_files_come_along(tmp_path):
    """Only the files of the tokenizer that was used are exported: none of the model's, none of an older export."""
    source, tokenizer, output = tmp_path / "source", tmp_path / "tokenizer", tmp_path / "output"
    save_model(source, "qwen3")
    tokenizer.mkdir()
    output.mkdir()
    (source / "chat_template.jinja").write_text("of the source")
    (output / "merges.txt").write_text("of an older export")
    (tokenizer / "tokenizer.json").write_text("of the job")
    export_shard(load(source), output, 0)
    finish_export(output, source, 1, write_tokenizer=lambda: export_tokenizer(output, str(tokenizer)))
    assert (output / "tokenizer.json").read_text() == "of the job"
    assert not (output / "merges.txt").exists()
    assert not (output / "chat_template.jinja").exists()
    assert (output / "generation_config.json").exists()


def test_a_folder_is_no_model_before_the_export_is_finished(tmp_path):
    """Before the index is there no tool finds a model, and nothing hidden is left after."""
    save_model(tmp_path / "source", "llama")
    output = tmp_path / "output"
    export_shard(load(tmp_path / "source"), output, 0)
    with pytest.raises((OSError, ValueError), match=r"config\.json"):
        transformers.AutoModelForCausalLM.from_pretrained(output)
    finish_export(output, tmp_path / "source", 1)
    assert not [path for path in output.iterdir() if path.name.startswith(".")]


def test_an_export_replaces_the_one_before(tmp_path):
    """A finished export leaves no file of the one before; an unfinished one leaves that whole."""
    one, other, output = tmp_path / "one", tmp_path / "other", tmp_path / "output"
    save_model(one, "llama")
    export(one, output, [0, 1, 2, NUM_LAYERS])
    before = logits(output)
    other_model = save_model(other, "llama", rms_norm_eps=0.1)
    export_shard(load(other), output, 0)
    assert torch.equal(logits(output), before)
    finish_export(output, other, 1)
    assert len(list(output.glob("*.safetensors"))) == 1
    with torch.no_grad():
        assert torch.equal(logits(output), other_model(token_ids()).logits)


def test_an_export_that_lacks_a_rank_or_a_layer_is_refused(tmp_path):
    """Missing shards name the ranks; stages that do not cover the model, or overlap, name a tensor."""
    source, output = tmp_path / "source", tmp_path / "output"
    save_model(source, "llama")
    export_shard(load(source, (0, 2)), output, 0)
    with pytest.raises(UnavailableError, match=r"ranks \[1\]"):
        finish_export(output, source, 2)
    export_shard(load(source, (3, 4)), output, 1)
    with pytest.raises(ModelError, match=r"model\.layers\.2"):
        finish_export(output, source, 2)
    export_shard(load(source, (1, 4)), output, 1)
    with pytest.raises(ModelError, match=r"model\.layers\.1.* another shard"):
        finish_export(output, source, 2)
    assert not (output / INDEX).exists()


def test_the_source_is_never_overwritten(tmp_path):
    """An output folder that holds the source's weights is refused; one with its config.json alone is not."""
    save_model(tmp_path / "source", "llama")
    with pytest.raises(ModelError, match="the folder of the source model"):
        check_output(tmp_path / "source", tmp_path / "source" / "config.json")
    check_output(tmp_path / "bare", write_config(tmp_path / "bare", "llama"))
    check_output(tmp_path / "elsewhere", tmp_path / "source")


def test_an_output_that_cannot_be_written_is_a_clear_error(tmp_path):
    """A file in the place of the output folder is an `UnavailableError`, not a traceback."""
    save_model(tmp_path / "source", "llama")
    (tmp_path / "output").write_text("")
    with pytest.raises(UnavailableError, match="cannot write the model"):
        export_shard(load(tmp_path / "source"), tmp_path / "output", 0)


def test_shards_say_that_they_are_of_torch(tmp_path):
    """Each file carries the metadata that transformers asks for."""
    save_model(tmp_path / "source", "llama")
    export(tmp_path / "source", tmp_path / "output", [0, NUM_LAYERS])
    with safe_open(next((tmp_path / "output").glob("*.safetensors")), framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_model_under_another_name_is_still_the_model(tmp_path: Path) -> None:
    """An output that leads to the model's own folder, through a link or a relative path, is refused."""
    model = tmp_path / "model"
    save_model(model, "llama")
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(model)
    for output in (tmp_path / "link", tmp_path / "other/../model", model):
        with pytest.raises(ModelError, match="the folder of the source model"):
            check_output(output, model)
    check_output(tmp_path / "other", model)


@pytest.mark.slow
def test_an_export_cut_off_anywhere_leaves_no_half_model(tmp_path: Path) -> None:
    """Killed before each file operation in turn: a reader finds the old model, the new one or none, whole."""
    command = [sys.executable, "-m", "tests.train.crash_exports", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10
