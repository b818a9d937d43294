"""`SglangServer`: SGLang's own HTTP interface: token numbers in, tokens with log-probabilities out.

Source: the interface of `python -m sglang.launch_server`: `/generate` with `input_ids`, `return_logprob` and, with
`--enable-deterministic-inference`, `sampling_seed`; `/update_weights_from_disk`; `/flush_cache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import httpx

from isthmus.core.errors import UnavailableError
from isthmus.serve.remote.token_server import TokenAnswer, TokenQuery, post_json, read_answer


class SglangServer:
    """A server at `url`, started with `--enable-deterministic-inference`: tokens do not depend on the batch."""

    name = "sglang"

    def __init__(
        self, url: str, vocab_size: int, timeout_s: float = 300.0, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self._client = httpx.Client(base_url=url, timeout=timeout_s, transport=transport, follow_redirects=False)

    def next_tokens(self, queries: Sequence[TokenQuery]) -> list[TokenAnswer | None]:
        """Return the next token of each sequence, all in one request."""
        body = {
            "input_ids": [list(one.tokens) for one in queries],
            "sampling_params": [
                {
                    "max_new_tokens": 1, "temperature": one.temperature, "sampling_seed": one.seed, "ignore_eos": True,
                    "skip_special_tokens": False, "top_k": -1, "top_p": 1.0,
                }
                for one in queries
            ],
            "return_logprob": True,
        }  # fmt: skip
        found = post_json(self._client, "/generate", body)
        if not isinstance(found, list) or len(found) != len(queries):
            raise UnavailableError(f"{self._client.base_url}/generate did not answer {len(queries)} sequences")
        return [self._read(one) for one in found]

    def load_weights(self, folder: Path) -> None:
        """Load the weights in `folder`, which the server can read, and forget cached prefixes."""
        body = {"model_path": str(folder), "flush_cache": True}
        found = post_json(self._client, "/update_weights_from_disk", body)
        if not isinstance(found, dict) or not found.get("success"):
            told = found.get("message", "") if isinstance(found, dict) else found
            hint = "let the server read the folder of the weights"
            raise UnavailableError(f"SGLang did not load {folder}: {told!s:.200}", hint=hint)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _read(self, one: object) -> TokenAnswer | None:
        try:
            value, token, *_ = one["meta_info"]["output_token_logprobs"][0]  # type: ignore[index]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
        return read_answer((token, value), self._vocab_size)
