"""`VllmServer`: vLLM's HTTP interface: token numbers in, tokens with log-probabilities out.

Source: the interface of `vllm serve`: `/v1/completions` with a prompt of token numbers, `seed`, `logprobs` and
`return_token_ids`; with `VLLM_SERVER_DEV_MODE=1`, `/collective_rpc` (`reload_weights`) and `/reset_prefix_cache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from isthmus.serve.remote.token_server import TokenAnswer, TokenQuery, post_json, read_answer

MAX_REQUESTS = 64
"""Requests under way at a time; the server batches them."""


class VllmServer:
    """A server at `url` for model `model`, as it names it.

    It is started with `VLLM_BATCH_INVARIANT=1`, so that tokens do not depend on the batch, and
    `--logprobs-mode processed_logprobs`, so that log-probabilities are those of the distribution that is drawn from.
    """

    name = "vllm"

    def __init__(
        self, url: str, model: str, vocab_size: int, timeout_s: float = 300.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:  # fmt: skip
        self._model, self._vocab_size = model, vocab_size
        self._client = httpx.Client(base_url=url, timeout=timeout_s, transport=transport, follow_redirects=False)
        self._requests = ThreadPoolExecutor(MAX_REQUESTS, "isthmus-vllm")

    def next_tokens(self, queries: Sequence[TokenQuery]) -> list[TokenAnswer | None]:
        """Return the next token of each sequence, in a request each: a request has one seed."""
        return list(self._requests.map(self._next_token, queries))

    def load_weights(self, folder: Path) -> None:
        """Load the weights in `folder`, which the server can read, and forget cached prefixes."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        post_json(self._client, "/collective_rpc", body)
        post_json(self._client, "/reset_prefix_cache", {})

    def close(self) -> None:
        """Close the connections."""
        self._requests.shutdown()
        self._client.close()

    def _next_token(self, query: TokenQuery) -> TokenAnswer | None:
        body = {
            "model": self._model, "prompt": list(query.tokens), "max_tokens": 1, "temperature": query.temperature,
            "seed": query.seed, "logprobs": 0, "return_token_ids": True, "ignore_eos": True, "top_p": 1.0,
        }  # fmt: skip
        found = post_json(self._client, "/v1/completions", body)
        try:
            choice = found["choices"][0]
            return read_answer((choice["token_ids"][0], choice["logprobs"]["token_logprobs"][0]), self._vocab_size)
        except (KeyError, IndexError, TypeError):
            return None
