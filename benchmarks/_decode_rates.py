"""What batch-invariant decoding costs: rates and bits of the paged engine beside transformers' `generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from transformers import PreTrainedModel, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from benchmarks.table import Row, compared
from isthmus.serve import DecodeRequest, PagedEngine, PagedEngineConfig, SequenceKey
from isthmus.serve.check_engine import decode_all

PROMPT_TOKENS = 8
CONFIG = Qwen3Config(
    vocab_size=512, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=256, tie_word_embeddings=False, eos_token_id=None,
    bos_token_id=None, pad_token_id=0,
)  # fmt: skip


def decode_rates(quick: bool) -> Iterator[Row]:
    """Yield tokens by CPU seconds for batches of 1 to 64 and tiles of 8 and 64 rows, and what a batch changes."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG).eval()
    prompts = torch.randint(1, CONFIG.vocab_size, (64, PROMPT_TOKENS))
    length = 8 if quick else 48
    for count in (1, 8, 64):
        theirs_s = _least_cpu_s(lambda count=count: _generate(model, prompts[:count], length))
        for rows in (8, 64):
            requests = _requests(prompts[:count], length)
            ours_s = _least_cpu_s(lambda rows=rows, requests=requests: decode_all(_engine(model, rows), requests))
            ours_s -= _least_cpu_s(lambda rows=rows: _engine(model, rows))
            what = f"tokens by CPU time, {count} sequences, tiles of {rows} rows, 4 layers of 256"
            yield compared(what, count * length / ours_s, "1/CPU-s", "transformers generate", count * length / theirs_s)
    yield from _changed(model, prompts, length)


def _changed(model: PreTrainedModel, prompts: torch.Tensor, length: int) -> Iterator[Row]:
    """Yield how many of 64 sequences differ in a batch from alone: ours as drawn, theirs in the logits of prompts."""
    requests = _requests(prompts, length)
    whole = decode_all(_engine(model, 8), requests)
    ours = sum(decode_all(_engine(model, 8), [one]) != {one.key: whole[one.key]} for one in requests)
    with torch.no_grad():
        together = model(prompts).logits
        theirs = sum(not torch.equal(model(one[None]).logits[0], together[at]) for at, one in enumerate(prompts))
    what = "of 64 sequences, those with other tokens or log-probabilities in a batch than alone"
    yield compared(what, ours, "", "transformers forward, logits", theirs, target="0", met=ours == 0)


def _engine(model: PreTrainedModel, rows: int) -> PagedEngine:
    config = PagedEngineConfig(num_pages=400, page_tokens=16, tile_rows=rows, max_tiles=64 // rows)
    return PagedEngine(CONFIG, config, 0, model.state_dict())


def _requests(prompts: torch.Tensor, length: int) -> list[DecodeRequest]:
    return [
        DecodeRequest(
            key=SequenceKey(number, 0), seed=0, prompt_tokens=tuple(prompt.tolist()), max_response_tokens=length
        )
        for number, prompt in enumerate(prompts)
    ]


def _generate(model: PreTrainedModel, prompts: torch.Tensor, length: int) -> None:
    model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=length,
        min_new_tokens=length,
    )  # fmt: skip


def _least_cpu_s(work: Callable[[], object], times: int = 2) -> float:
    found = []
    for _ in range(times):
        start_s = time.process_time()
        work()
        found.append(time.process_time() - start_s)
    return min(found)
