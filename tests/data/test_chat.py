"""Rules of fine-tuning data: the loss is on the answers only, and an answer is cut only where it must be."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus.core.errors import DataError
from isthmus.core.job import DataConfig
from isthmus.data.byte_tokenizer import ByteTokenizer
from isthmus.data.chat import Turn, tokenize_conversation
from isthmus.data.chat_template import ChatRenderer, ChatTemplate, RenderLimits, find_chat_template
from tests.data.corpora import conversation, opened, write_lines, write_tokenizer

pytestmark = pytest.mark.integration

END, PADDING = 257, 258
on_disk = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
words = st.text("abcdefgh \n", min_size=1, max_size=30)
conversations = st.lists(
    st.lists(words, min_size=2, max_size=6).map(lambda texts: conversation(*texts[: len(texts) // 2 * 2])),
    min_size=1,
    max_size=6,
)


def learned(batch):
    """Return the label tokens that count, row by row."""
    return [[token for token in row if token != -100] for row in batch.labels.tolist()]


def answers(lines):
    return [m["content"] for line in lines for m in line["messages"] if m["role"] == "assistant"]


def test_the_plain_template_is_the_one_that_is_stated(tmp_path):
    """Roles head their messages, an answer ends with the end token, and only answers have labels."""
    line = {"messages": [{"role": "system", "content": "Terse."}, *conversation("Hi?", "Yes.")["messages"]]}
    batch = opened(write_lines(tmp_path / "a.jsonl", [line]), task="finetune", sequence_length=60).train_batch(0, 1)
    ids = batch.input_ids[0].tolist()
    text = b"<|system|>\nTerse.\n<|user|>\nHi?\n<|assistant|>\nYes."
    assert bytes(ids[: len(text)]) == text
    assert set(ids[len(text) + 1 :]) == {PADDING}
    assert learned(batch) == [[*b"Yes.", END]]


@given(lines=conversations)
@settings(on_disk, max_examples=8)
def test_every_token_of_every_answer_is_learned_once(tmp_path_factory, lines):
    """Over an epoch the labels are exactly the answers with their ends, however they are packed."""
    path = write_lines(tmp_path_factory.mktemp("data") / "a.jsonl", lines)
    dataset = opened(path, task="finetune", sequence_length=40)
    labels = sorted(token for row in learned(dataset.train_batch(0, dataset.num_samples)) for token in row)
    assert labels == sorted(token for text in answers(lines) for token in (*text.encode(), END))


@given(lines=conversations, width=st.integers(2, 120))
@on_disk
def test_pieces_fit_and_cut_only_what_is_too_long(tmp_path_factory, lines, width):
    """A piece never exceeds the width, and an exchange that fits is never divided."""
    for line in lines:
        texts = [message["content"] for message in line["messages"]]
        turns = [Turn(prompt=f"<{a}>", answer=b) for a, b in zip(texts[::2], texts[1::2], strict=True)]
        pieces = tokenize_conversation(line["messages"], lambda _: [turns], ByteTokenizer(), width)  # noqa: B023
        assert all(len(piece.tokens) <= width for piece in pieces)
        whole = [bytes(piece.tokens.tolist()).decode() for piece in pieces]
        for text in (turn.prompt + turn.answer for turn in turns):
            if len(text) <= width:
                assert any(text in piece for piece in whole)


def test_labels_follow_their_inputs(tmp_path):
    """Where a label counts it is the next input, also across packed conversations."""
    lines = [conversation(f"question {i}", f"answer {i}") for i in range(12)]
    dataset = opened(write_lines(tmp_path / "a.jsonl", lines), task="finetune", sequence_length=100)
    batch = dataset.train_batch(0, dataset.num_samples)
    assert dataset.num_samples < 12
    following, labels = batch.input_ids[:, 1:], batch.labels[:, :-1]
    assert bool(((labels == -100) | (labels == following)).all())


def test_held_out_conversations_are_whole_and_apart(tmp_path):
    """Validation holds whole conversations, at least one, none of which is trained on."""
    lines = [conversation("q", f"<{i:02d}>") for i in range(20)]
    path = write_lines(tmp_path / "a.jsonl", lines)
    dataset = opened(path, task="finetune", sequence_length=31, validation_fraction=0.2)
    training, held_out = (
        {bytes(row[:-1]).decode() for row in learned(batch)}
        for batch in (
            dataset.train_batch(0, dataset.num_samples),
            dataset.validation_batch(dataset.num_validation_samples),
        )
    )
    assert len(held_out) == 4
    assert training | held_out == {f"<{i:02d}>" for i in range(20)}
    assert not training & held_out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"text": "x"}, r"a\.jsonl:2: no 'messages' list, only \['text'\]"),
        ({"messages": []}, r"a\.jsonl:2: no 'messages' list"),
        ({"messages": ["hello"]}, r"a\.jsonl:2: message 'hello' lacks a text role"),
        ({"messages": [{"role": "user", "content": None}]}, r"a\.jsonl:2: message .* lacks a text role"),
        ({"messages": [{"role": "user", "content": "x"}]}, r"a\.jsonl:2: no message of role 'assistant'"),
    ],
)
def test_a_malformed_conversation_is_named(tmp_path, line, message):
    """A bad conversation is answered with file, line and what a good one looks like."""
    path = write_lines(tmp_path / "a.jsonl", [conversation("q", "a"), line])
    with pytest.raises(DataError, match=message) as caught:
        opened(path, task="finetune")
    assert caught.value.hint


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|im_end|>", "<|im_start|>")


def chat_tokenizer(folder, template=CHATML):
    settings = {
        "eos_token": "<|im_end|>",
        "chat_template": template,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return str(write_tokenizer(folder, specials=SPECIALS, settings=settings))


def decoded(folder, ids):
    from tokenizers import Tokenizer, decoders

    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_the_tokenizers_own_template_is_obeyed(tmp_path):
    """With a chat template in the folder, prompt and answer are what it renders; its turn end is learned."""
    folder = chat_tokenizer(tmp_path / "tokenizer")
    path = write_lines(tmp_path / "a.jsonl", [conversation("hello", "world", "the capital", "Lanzhou")])
    batch = opened(path, task="finetune", sequence_length=100, tokenizer=folder).train_batch(0, 1)
    text = decoded(folder, batch.input_ids[0].tolist())
    assert text.startswith(
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nworld<|im_end|>\n"
        "<|im_start|>user\nthe capital<|im_end|>\n<|im_start|>assistant\nLanzhou<|im_end|>\n"
    )
    assert decoded(folder, learned(batch)[0]) == "world<|im_end|>\nLanzhou<|im_end|>\n"


def test_a_template_that_rewrites_earlier_turns_gives_each_answer_its_own_prompt(tmp_path):
    """Where earlier answers lose their reasoning, each answer is learned after its own prompt."""
    folder = chat_tokenizer(tmp_path / "tokenizer")
    path = write_lines(tmp_path / "a.jsonl", [conversation("hello", "so</think>world", "user", "no</think>Gansu")])
    batch = opened(path, task="finetune", sequence_length=200, tokenizer=folder).train_batch(0, 1)
    text = decoded(folder, batch.input_ids[0].tolist())
    assert text.count("hello") == 2
    assert decoded(folder, learned(batch)[0]) == "so</think>world<|im_end|>\nno</think>Gansu<|im_end|>\n"
    assert "assistant\nworld<|im_end|>" in text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "rejects .*roles must alternate"),
        ("{{ messages | length }}", "does not render the answer after its prompt"),
        ("{% if %}", "rejects"),
    ],
)
def test_a_template_that_cannot_be_used_is_named(tmp_path, template, message):
    """A template that fails, or hides the answer, is a `DataError` that names its folder."""
    folder = chat_tokenizer(tmp_path / "tokenizer", template)
    path = write_lines(tmp_path / "a.jsonl", [conversation("hello", "world")])
    with pytest.raises(DataError, match=message) as caught:
        opened(path, task="finetune", tokenizer=folder)
    assert folder in caught.value.message


def test_half_surrogates_in_a_conversation_are_replaced(tmp_path):
    """Text that has no UTF-8 form is trained on with a question mark in its place."""
    turns = '{"role": "user", "content": "q\\ud800"}, {"role": "assistant", "content": "a\\udc00"}'
    (tmp_path / "a.jsonl").write_text(f'{{"messages": [{turns}]}}\n')
    batch = opened(str(tmp_path / "a.jsonl"), task="finetune", sequence_length=64).train_batch(0, 1)
    assert bytes(one for one in batch.labels[0].tolist() if 0 <= one < 256) == b"a?"


def rendered(text, messages=({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}), **limits):
    template = ChatTemplate(text=text, origin="hostile", tokens={"eos_token": "</s>"})
    with ChatRenderer(template, RenderLimits(**limits)) as render:
        return render(list(messages))


@pytest.mark.parametrize("tokenizer", ["bytes", "a folder without a template"])
def test_conversations_without_a_template_are_refused(tmp_path, tokenizer):
    """The error says what to add; nothing is rendered in a format that nobody chose."""
    name = tokenizer if tokenizer == "bytes" else str(write_tokenizer(tmp_path / "t", specials=["</s>"]))
    path = write_lines(tmp_path / "a.jsonl", [conversation("hello", "world")])
    with pytest.raises(DataError, match="has no chat template") as caught:
        opened(path, task="finetune", tokenizer=name)
    assert "data.chat_template" in caught.value.hint
    assert "chat_template.jinja beside the tokenizer" in caught.value.hint


def test_the_template_of_the_job_wins_and_is_logged(tmp_path):
    """`chat_template` of the job replaces the tokenizer's; the log names its origin and digest."""
    folder = chat_tokenizer(tmp_path / "tokenizer")
    path = write_lines(tmp_path / "a.jsonl", [conversation("hello", "world")])
    own = "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}>{% endif %}{% endfor %}"
    dataset = opened(path, task="finetune", sequence_length=40, tokenizer=folder, chat_template=own)
    assert decoded(folder, dataset.train_batch(0, 1).input_ids[0].tolist()).startswith("hello>world")
    log = dataset.describe()
    assert log[0].startswith(f"tokenizer {folder}: ")
    assert log[1].startswith(f"chat template of the job: {len(own)} characters, sha256 ")


def test_the_plain_template_ends_answers_with_the_token_that_ends_documents(tmp_path):
    """A tokenizer whose settings name no eos_token still ends each answer."""
    folder = str(write_tokenizer(tmp_path / "t", specials=["</s>"]))
    path = write_lines(tmp_path / "a.jsonl", [conversation("hello", "world")])
    batch = opened(path, task="finetune", sequence_length=40, tokenizer=folder, chat_template="plain").train_batch(0, 1)
    assert decoded(folder, learned(batch)[0]) == "world</s>"


def test_a_template_renders_as_in_transformers(tmp_path):
    """Blocks are trimmed, `tojson` keeps letters, loop controls, `generation` and the first date work."""
    from transformers.utils.chat_template_utils import render_jinja_template

    text = """{%- set found = namespace(n=0) %}
{% for m in messages %}
    {% if m.role == 'tool' %}{% continue %}{% endif %}
    {% set found.n = found.n + 1 %}
{{ found.n }} {{ m | tojson }}{{ dict(a=1)['a'] }}
    {%- if m.role == 'assistant' %}{% generation %}é<{{ m.content }}{% endgeneration %}{{ eos_token }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}go{% endif %}"""
    messages = [{"role": "user", "content": "ä'<"}, {"role": "assistant", "content": "b"}]
    template = ChatTemplate(text=text, origin="test", tokens={"eos_token": "</s>"})
    expected = [
        render_jinja_template([part], chat_template=text, add_generation_prompt=ask, eos_token="</s>")[0][0]
        for part, ask in ((messages[:1], True), (messages, False))
    ]
    with ChatRenderer(template) as render, pytest.raises(DataError, match="does not render the answer"):
        render(messages)  # the prompt ends with "go": the answer cannot follow it
    with ChatRenderer(ChatTemplate(text=text.replace("go", ""), origin="test", tokens={"eos_token": "</s>"})) as render:
        (turn,) = render(messages)[0]
    assert turn.prompt + "go" == expected[0]
    assert turn.prompt + turn.answer == expected[1]


@pytest.mark.parametrize(
    "text",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**11 }}",
        "{{ 9**(9**9) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a in range(99999) %}{{ 'abcdefgh' * 100000 }}{% endfor %}",
        "{{ '%9999999999d' % 1 }}",
        "{{ ''.__class__.__mro__ }}{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ 'a' * 300000 }}",
    ],
    ids=["loop", "memory", "power", "recursion", "output", "format", "attributes", "mutation", "long"],
)
def test_a_hostile_template_ends_within_its_limits(text):
    """A template that loops, grows or reaches for Python is a `DataError`, within CPU time and memory."""
    with pytest.raises(DataError, match="hostile"):
        rendered(text, cpu_s=0.3, memory_bytes=256 << 20, chars=100_000)


def test_a_template_file_without_end_is_read_to_its_limit(tmp_path):
    """A template beside the tokenizer may be of any size: it is refused by its length."""
    folder = write_tokenizer(tmp_path / "t", specials=["</s>"])
    (folder / "chat_template.jinja").write_text("{{ 1 }}" + " " * (1 << 18))
    with pytest.raises(DataError, match="at most 262,144"):
        find_chat_template(DataConfig(paths=("x",), tokenizer=str(folder)), {})
