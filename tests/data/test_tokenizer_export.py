"""Rules of the exported tokenizer: transformers reads from the result the ids that training used."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from isthmus.data import export_tokenizer
from isthmus.data.chat_template import ChatTemplate, find_chat_template
from tests.data.corpora import conversation, opened, write_lines, write_tokenizer

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
TEXT = "Hi? \n\t  ä漢\x00'\U0001f600"


def exported(folder, tokenizer, template=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    export_tokenizer(folder, tokenizer, template)
    return AutoTokenizer.from_pretrained(folder)


def test_the_bytes_tokenizer_is_exported_as_one_that_transformers_loads(tmp_path):
    """Ids are the bytes of the text, decoding restores it, and begin, end and padding are 256 to 258."""
    loaded = exported(tmp_path, "bytes")
    assert loaded(TEXT)["input_ids"] == list(TEXT.encode())
    assert loaded.decode(list(TEXT.encode())) == TEXT
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id, len(loaded)) == (256, 257, 258, 259)


@pytest.mark.parametrize("tokenizer", ["bytes", "own"])
def test_the_exported_template_gives_the_tokens_that_were_trained_on(tmp_path, tokenizer):
    """`apply_chat_template` of the exported tokenizer tokenises a conversation as the data set did."""
    name = tokenizer if tokenizer == "bytes" else str(write_tokenizer(tmp_path / "own", specials=["</s>"]))
    line = conversation("hello", "the capital", "of Gansu?", "Lanzhou")
    path = write_lines(tmp_path / "a.jsonl", [line])
    dataset = opened(path, task="finetune", sequence_length=120, tokenizer=name, chat_template="plain")
    loaded = exported(tmp_path / "result", dataset.tokenizer, dataset.template)
    ids = loaded.apply_chat_template(line["messages"], tokenize=True, return_dict=False)
    assert dataset.train_batch(0, 1).input_ids[0].tolist()[: len(ids)] == ids
    assert json.loads((tmp_path / "result/tokenizer_config.json").read_text())["chat_template"] == dataset.template.text


def test_a_second_export_leaves_nothing_of_the_first(tmp_path):
    """A folder that held another tokenizer and template holds the new tokenizer alone."""
    own = str(write_tokenizer(tmp_path / "own", specials=["</s>"]))
    exported(tmp_path / "result", own, ChatTemplate(text="{{ 1 }}", origin="job", tokens={}))
    loaded = exported(tmp_path / "result", "bytes")
    assert loaded.chat_template is None
    assert len(loaded) == 259


def test_a_result_in_the_folder_of_its_tokenizer_keeps_it(tmp_path):
    """An export into the tokenizer's own folder does not delete it."""
    own = write_tokenizer(tmp_path, specials=["</s>"])
    before = (own / "tokenizer.json").read_bytes()
    exported(own, str(own / "tokenizer.json"))
    assert (own / "tokenizer.json").read_bytes() == before


def test_a_list_of_named_templates_gives_the_default(tmp_path):
    """`tokenizer_config.json` may hold several templates; the file `chat_template.jinja` precedes them."""
    from isthmus.core.job import DataConfig

    named = [{"name": "tool_use", "template": "{{ 2 }}"}, {"name": "default", "template": "{{ 1 }}"}]
    folder = write_tokenizer(tmp_path, specials=["</s>"], settings={"chat_template": named})
    data = DataConfig(paths=("x",), tokenizer=str(folder))
    assert find_chat_template(data, {}).text == "{{ 1 }}"
    (folder / "chat_template.jinja").write_text("{{ 3 }}")
    assert find_chat_template(data, {}).text == "{{ 3 }}"
