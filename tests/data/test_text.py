"""Rules of text data: every token is trained on once an epoch, and any sample can be asked for by number."""

from __future__ import annotations

import json
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus.core.errors import DataError
from tests.data.corpora import opened, write_lines, write_texts, write_tokenizer

pytestmark = pytest.mark.integration

END, PADDING = 257, 258
texts = st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=6)
on_disk = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def epoch_of(dataset):
    return dataset.train_batch(0, dataset.num_samples)


def sorted_rows(batch):
    return sorted(zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True))


def text_of(ids):
    return bytes(token for token in ids if token < 256).decode()


@given(contents=texts, sequence_length=st.integers(1, 20))
@on_disk
def test_packing_loses_no_token_and_doubles_none(tmp_path_factory, contents, sequence_length):
    """Over an epoch each token but the first is a label once, each but the last an input once."""
    path = write_lines(tmp_path_factory.mktemp("data") / "a.jsonl", [{"text": text} for text in contents])
    batch = epoch_of(opened(path, sequence_length=sequence_length))
    stream = [token for text in contents for token in (*text.encode(), END)]
    labels = batch.labels[batch.labels != -100]
    assert sorted(labels.tolist()) == sorted(stream[1:])
    inputs = batch.input_ids[batch.input_ids != PADDING]
    assert sorted(inputs[: len(inputs)].tolist()) in (sorted(stream[:-1]), sorted(stream))
    pairs = zip(batch.input_ids[:, 1:].flatten(), batch.labels[:, :-1].flatten(), strict=True)
    assert all(label in (-100, token) for token, label in pairs)


@given(first=st.integers(0, 200), a=st.integers(1, 9), b=st.integers(1, 9), seed=st.integers(0, 2**40))
@on_disk
def test_a_batch_is_the_batches_it_is_made_of(tmp_path_factory, first, a, b, seed):
    """`train_batch(k, a + b)` is `train_batch(k, a)` then `train_batch(k + a, b)`: resuming is exact."""
    path = tmp_path_factory.getbasetemp() / "shared"
    if not path.exists():
        write_texts(path, [f"document {i}\n" * 20 for i in range(4)])
    dataset = opened(str(path), seed=seed)
    whole, left, right = (dataset.train_batch(*x) for x in ((first, a + b), (first, a), (first + a, b)))
    assert torch.equal(whole.input_ids, torch.cat([left.input_ids, right.input_ids]))
    assert torch.equal(whole.labels, torch.cat([left.labels, right.labels]))


def test_every_worker_sees_the_same_data(tmp_path):
    """Two data sets opened from the same files and seed agree; torch's own seed plays no part."""
    path = write_texts(tmp_path, ["some text " * 50, "other text " * 50])
    batches = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        batches.append(opened(path, seed=5).train_batch(7, 4))
    assert torch.equal(batches[0].input_ids, batches[1].input_ids)
    assert not torch.equal(batches[0].input_ids, opened(path, seed=6).train_batch(7, 4).input_ids)


def test_epochs_follow_on_and_differ_in_order(tmp_path):
    """The second epoch holds the samples of the first in another order."""
    dataset = opened(write_texts(tmp_path, ["abcdefghij" * 60]))
    one = dataset.train_batch(0, dataset.num_samples)
    two = dataset.train_batch(dataset.num_samples, dataset.num_samples)
    assert sorted_rows(one) == sorted_rows(two)
    assert not torch.equal(one.input_ids, two.input_ids)


def test_batches_are_int64_tensors_of_sequence_length(tmp_path):
    """Ids and labels are `[n, S]` int64."""
    batch = opened(write_texts(tmp_path, ["abcdefghij" * 60]), sequence_length=12).train_batch(0, 3)
    assert batch.input_ids.shape == batch.labels.shape == (3, 12)
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64


@given(
    contents=st.lists(st.integers(1, 400), min_size=1, max_size=8),
    fraction=st.floats(0.01, 0.5),
)
@on_disk
def test_the_held_out_split_is_disjoint_and_of_its_size(tmp_path_factory, contents, fraction):
    """Training and validation divide the tokens: nothing is in both, and validation has its fraction."""
    alphabet = iter(range(0x4E00, 0x9FFF))
    documents = ["".join(chr(next(alphabet)) for _ in range(length)) for length in contents]
    path = write_lines(tmp_path_factory.mktemp("data") / "a.jsonl", [{"text": text} for text in documents])
    tokenizer = _characters(tmp_path_factory)
    total = sum(contents)
    if total < 4:
        return
    dataset = opened(path, validation_fraction=fraction, sequence_length=4, tokenizer=str(tokenizer))
    training = set(epoch_of(dataset).input_ids.flatten().tolist()) - {0, 1}
    held_out = set(dataset.validation_batch(dataset.num_validation_samples).input_ids.flatten().tolist()) - {
        0,
        1,
    }
    assert not training & held_out
    assert len(held_out) <= min(max(round(fraction * total), 5), total // 2)
    assert len(training) + len(held_out) >= total - 2


def _characters(tmp_path_factory):
    """Return a tokenizer of one token per Chinese character; 0 is unknown, 1 ends a document."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    file = tmp_path_factory.getbasetemp() / "characters.json"
    if not file.exists():
        vocabulary = {"<unk>": 0, "</s>": 1} | {chr(c): c - 0x4E00 + 2 for c in range(0x4E00, 0x9FFF)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        tokenizer.save(str(file))
    return file


def test_the_split_does_not_depend_on_the_seed_or_on_file_names(tmp_path):
    """Another seed, or the same documents under other names, hold out the same text."""
    documents = [f"document number {i} " * 9 for i in range(30)]
    one = write_texts(tmp_path / "one", documents)
    other = write_texts(tmp_path / "other", documents[::-1])
    options = {"validation_fraction": 0.2, "sequence_length": 8}
    first, second, third = (opened(path, seed=seed, **options) for path, seed in ((one, 1), (one, 2), (other, 1)))
    seen = [d.validation_batch(d.num_validation_samples).input_ids for d in (first, second, third)]
    assert torch.equal(seen[0], seen[1])
    assert sorted(seen[0].flatten().tolist()) == sorted(seen[2].flatten().tolist())


def test_validation_repeats_where_little_is_held_out(tmp_path):
    """A validation batch has the size asked for and is always the same."""
    dataset = opened(write_texts(tmp_path, ["abcdefghij" * 60]), validation_fraction=0.05)
    n = dataset.num_validation_samples
    assert 0 < n < 20
    assert dataset.validation_batch(20).input_ids.shape == (20, 16)
    assert torch.equal(dataset.validation_batch(20).labels, dataset.validation_batch(20).labels)


def test_validation_without_a_split_is_refused(tmp_path):
    """Asking for held-out samples where none are held out says which field to set."""
    with pytest.raises(DataError, match="held out") as caught:
        opened(write_texts(tmp_path, ["abc" * 60])).validation_batch(1)
    assert "validation_fraction" in caught.value.hint


def test_json_lines_take_the_named_field(tmp_path):
    """`text_field` names the text; `auto_plan` knows .jsonl, and an explicit format overrides the name."""
    lines = [{"body": "hello", "text": "no"}, {"body": "wörld", "text": "no"}]
    for name, fields in (("a.jsonl", {}), ("b.data", {"format": "jsonl"})):
        batch = epoch_of(opened(write_lines(tmp_path / name, lines), text_field="body", **fields))
        assert text_of(batch.input_ids.flatten().tolist()) == "hellowörld"
    raw = epoch_of(opened(str(tmp_path / "a.jsonl"), format="text", sequence_length=200))
    assert text_of(raw.input_ids[0].tolist()) == (tmp_path / "a.jsonl").read_text()


def test_blank_lines_are_no_documents(tmp_path):
    """Blank lines of a JSON Lines file are passed over, and do not shift the line numbers of errors."""
    file = tmp_path / "a.jsonl"
    file.write_text('\n{"text": "abc"}\n\n{"text": 3}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:4: field 'text' is 3"):
        opened(str(file))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "abc"', r"a\.jsonl:2: not JSON"),
        ('["text"]', r"a\.jsonl:2: a JSON list, not an object"),
        ('{"body": "abc"}', r"a\.jsonl:2: no field 'text', only \['body'\]"),
        ('{"text": null}', r"a\.jsonl:2: field 'text' is None, not text"),
        ("\x00\x01", r"a\.jsonl:2: not JSON"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    """A bad line is answered with file, line number, what is wrong and what to do."""
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "' + b"x" * 9000 + b'"}\n' + line.encode() + b"\n")
    with pytest.raises(DataError, match=message) as caught:
        opened(str(file))
    assert caught.value.hint


def test_too_little_data_for_a_batch_is_refused(tmp_path):
    """A batch larger than the data set is an error with both numbers, and so is a set without a sample."""
    dataset = opened(write_texts(tmp_path / "a", ["abcdefghij" * 5]))
    with pytest.raises(DataError, match=r"yields 4 samples, one batch needs 5") as caught:
        dataset.train_batch(0, 5)
    assert "sequence_length" in caught.value.hint
    dataset.check_job_fits(num_samples=4)
    with pytest.raises(DataError, match="0 samples"):
        opened(write_lines(tmp_path / "a.jsonl", [{"text": ""}]))


def test_a_vocabulary_larger_than_the_models_is_refused(tmp_path):
    """The byte tokenizer has 259 tokens; a model of 256 is refused with both numbers."""
    dataset = opened(write_texts(tmp_path, ["abc" * 20]))
    dataset.check_job_fits(vocab_size=259)
    with pytest.raises(DataError, match="259 tokens, the model only 256"):
        dataset.check_job_fits(vocab_size=256)


def test_any_tokenizer_file_serves(tmp_path):
    """A tokenizer.json, named by file or folder, gives its own ids with its end token between documents."""
    folder = write_tokenizer(tmp_path / "tokenizer", specials=["</s>", "<pad>"], settings={"pad_token": "<pad>"})
    path = write_texts(tmp_path / "data", ["hello world", "the capital"])
    datasets = [opened(path, tokenizer=str(name)) for name in (folder, folder / "tokenizer.json")]
    one, two = (epoch_of(dataset).input_ids for dataset in datasets)
    assert torch.equal(one, two)
    assert (one == 0).sum() == 2
    assert one[0, -1] == 1
    assert (
        datasets[0].vocab_size
        == max(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"].values()) + 1
    )


def test_an_end_token_named_as_an_object_is_understood(tmp_path):
    """`eos_token` may be written as a string or as an object with its content."""
    settings = {"eos_token": {"content": "<stop>", "lstrip": False}}
    folder = write_tokenizer(tmp_path / "tokenizer", specials=["<stop>", "</s>"], settings=settings)
    batch = epoch_of(opened(write_texts(tmp_path / "data", ["hello"]), tokenizer=str(folder)))
    assert 0 in batch.labels


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: None, "no tokenizer at"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "cannot read tokenizer"),
        (lambda folder: write_tokenizer(folder), "no token that ends a document"),
        (
            lambda folder: write_tokenizer(folder) and (folder / "tokenizer_config.json").write_text("{"),
            "not JSON",
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_named(tmp_path, prepare, message):
    """A missing, damaged or endless tokenizer is a `DataError` with its path."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    prepare(folder)
    with pytest.raises(DataError, match=message) as caught:
        opened(write_texts(tmp_path / "data", ["hello"]), tokenizer=str(folder))
    assert str(folder) in caught.value.message


def test_fine_tuning_needs_conversations_and_they_need_fine_tuning(tmp_path):
    """Text for fine-tuning, or chat format for another task, is refused with what to change."""
    path = write_texts(tmp_path / "data", ["hello"])
    with pytest.raises(DataError, match="needs conversations"):
        opened(path, task="finetune")
    chat = write_lines(tmp_path / "a.jsonl", [{"messages": []}])
    with pytest.raises(DataError, match="needs text"):
        opened(chat, format="chat")


@pytest.mark.on_the_clock
@pytest.mark.slow
def test_thirty_megabytes_open_in_about_a_second(tmp_path):
    """30 MB of text in a thousand files open within 3 s on a busy core (0.3 s on a free one)."""
    write_texts(tmp_path, [f"{i} " + "a line of text, forty bytes long or so\n" * 750 for i in range(1000)])
    begun = time.perf_counter()
    dataset = opened(str(tmp_path), sequence_length=256, validation_fraction=0.01)
    assert time.perf_counter() - begun < 3
    assert dataset.num_samples > 110_000


def test_odd_encodings_are_read_or_passed_over(tmp_path):
    """A byte order mark, bytes that are no UTF-8 and half surrogates are read; UTF-16 counts as binary."""
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"text": "marked"}\r\n')
    (tmp_path / "half.jsonl").write_text('{"text": "\\ud800 half"}\n')
    (tmp_path / "latin.txt").write_bytes("Gr\u00fc\u00dfe".encode("latin-1"))
    (tmp_path / "wide.txt").write_text("wide", encoding="utf-16")
    dataset = opened(str(tmp_path), sequence_length=64)
    assert dataset.num_skipped_files == 1
    ids = [one for one in dataset.train_batch(0, 1).input_ids[0].tolist() if one < 256]
    assert bytes(ids) == b"marked? halfGr\xfc\xdfe"
    folder = write_tokenizer(tmp_path / "tokenizer", specials=["</s>"])
    assert opened(str(tmp_path / "latin.txt"), tokenizer=str(folder)).num_samples == 1


def test_a_line_too_deep_to_parse_is_named(tmp_path):
    """JSON nested beyond what Python parses is an error with its line, not a crash."""
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": ' + "[" * 200_000 + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl:2: not JSON"):
        opened(str(tmp_path / "a.jsonl"))


def test_one_line_of_megabytes_is_a_document(tmp_path):
    """A huge line is read like any other, also as the only one."""
    path = write_lines(tmp_path / "a.jsonl", [{"text": "x" * 3_000_000}])
    assert opened(path, sequence_length=1000).num_samples == 3000


def test_lines_without_documents_are_too_little(tmp_path):
    """A file of blank lines and empty texts makes no sample, and says so."""
    (tmp_path / "a.jsonl").write_text('\n  \n{"text": ""}\n')
    with pytest.raises(DataError, match="the data yields 0 samples"):
        opened(str(tmp_path / "a.jsonl"))
