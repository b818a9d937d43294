"""`NewerServer`: a real API server that says to be of a later release; it forwards every request as it is."""

from __future__ import annotations

import contextlib
import http.server
import json
import ssl
import threading

import httpx

from tests.kubernetes.api_server import ApiServer

VERSION = {"major": "1", "minor": "24"}
"""The least release that holds need; Debian's API server is older, and no request of a site that joins shows it."""


class NewerServer:
    """A way to `server` with its certificate; `kubeconfig` names it."""

    def __init__(self, server: ApiServer) -> None:
        certificates = server.root / "certs"
        trusted = ssl.create_default_context(cafile=str(certificates / "apiserver.crt"))
        forward = httpx.Client(base_url=server.address, verify=trusted, timeout=60.0, trust_env=False)

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
                with forward.stream(
                    self.command, self.path, headers=headers, content=self.rfile.read(length)
                ) as answer:
                    self.send_response(answer.status_code)
                    self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
                    self.end_headers()
                    if self.path == "/version":
                        self.wfile.write(json.dumps(json.loads(answer.read()) | VERSION).encode())
                        return
                    with contextlib.suppress(OSError):
                        for chunk in answer.iter_bytes():
                            self.wfile.write(chunk)

            do_POST = do_PATCH = do_DELETE = do_GET  # noqa: N815 - the names that http.server asks for

            def log_message(self, *_arguments: object) -> None:
                return

        self._listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(certificates / "apiserver.crt", certificates / "apiserver.key")
        self._listener.socket = tls.wrap_socket(self._listener.socket, server_side=True)
        self.address = f"https://127.0.0.1:{self._listener.server_address[1]}"
        threading.Thread(target=self._listener.serve_forever, daemon=True).start()

    def end(self) -> None:
        """Stop listening."""
        self._listener.shutdown()
        self._listener.server_close()
