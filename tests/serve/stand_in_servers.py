"""Stand-ins for servers of vLLM and SGLang: their documented HTTP interfaces over a small deterministic model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

VOCAB = 12
Answer = Callable[[str, dict[str, Any]], tuple[int, Any]]


class Model:
    """A distribution that follows from the weights and all tokens; a draw follows from it and the seed."""

    def __init__(self) -> None:
        self.weights = b"first"
        self.cached: set[bytes] = set()

    def load(self, folder: str) -> None:
        """Load the weights of a folder that has a configuration too."""
        json.loads((Path(folder) / "config.json").read_text())
        found = load_file(Path(folder) / "model.safetensors")
        self.weights = b"".join(found[name].tobytes() for name in sorted(found))

    def next_token(self, tokens: list[int], seed: int, temperature: float) -> tuple[int, float]:
        """Return a token and its log-probability."""
        name = hashlib.sha256(self.weights + repr(tokens).encode()).digest()
        logits = np.random.default_rng(int.from_bytes(name[:8], "little")).normal(size=VOCAB)
        if temperature:
            logits = logits / temperature
        chances = np.exp(logits - logits.max())
        chances /= chances.sum()
        token = int(np.random.default_rng(seed).choice(VOCAB, p=chances)) if temperature else int(chances.argmax())
        return token, float(np.log(chances[token]))


def sglang(model: Model) -> Answer:
    """Return what answers as SGLang does."""

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/update_weights_from_disk":
            try:
                model.load(body["model_path"])
            except OSError as error:
                return 200, {"success": False, "message": str(error)}
            return 200, {"success": True, "message": "Succeeded to update model weights."}
        if path != "/generate":
            return 404, {"error": path}
        found = []
        for tokens, given in zip(body["input_ids"], body["sampling_params"], strict=True):
            token, value = model.next_token(tokens, given["sampling_seed"], given["temperature"])
            told = {"output_token_logprobs": [[value, token, None]], "finish_reason": {"type": "length", "length": 1}}
            found.append({"text": "", "output_ids": [token], "meta_info": told})
        return 200, found

    return answer


def vllm(model: Model) -> Answer:
    """Return what answers as vLLM does."""

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/collective_rpc":
            if body["method"] != "reload_weights":
                return 400, {"error": body["method"]}
            model.load(body["kwargs"]["weights_path"])
            return 200, {"results": [None]}
        if path == "/reset_prefix_cache":
            return 200, None
        if path != "/v1/completions" or body["model"] != "small":
            return 404, {"error": {"message": f"no {path} of {body.get('model')}"}}
        token, value = model.next_token(body["prompt"], body["seed"], body["temperature"])
        choice = {
            "index": 0, "text": "", "token_ids": [token], "finish_reason": "length",
            "logprobs": {"token_logprobs": [value], "tokens": [f"token_id:{token}"]},
        }  # fmt: skip
        return 200, {"object": "text_completion", "model": "small", "choices": [choice]}

    return answer


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """Serve on a free port of this machine; yield the address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, found = answer(self.path, body)
            content = b"" if found is None else json.dumps(found).encode()
            self.send_response(status)
            if status in (301, 302, 307):
                self.send_header("location", "http://169.254.169.254/")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
