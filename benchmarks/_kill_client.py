"""A client that submits to a server that is killed: `python -m benchmarks._kill_client FOLDER PORT NUMBER`.

It submits under new keys until FOLDER has a file `stop`, repeats what is not answered, and writes down what is:
lines of key and job in `acknowledged-NUMBER`. It imports nothing of the project, so that eight of them start at once.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import sys
import time
from pathlib import Path

TEMPLATE, NAME = "template.json", "NAME"
"""The file with a submission as JSON, and what stands in it for its name and its key."""
PAUSE_S, RETRY_S = 0.01, 0.05
"""Pause of a client between two requests, and before it repeats one."""
BULK, BULK_SHARE = 20, 0.1
"""Jobs of a bulk submission, and the share of the requests that are one."""


def main() -> None:
    """Submit until told to stop."""
    folder, port, number = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    template = (folder / TEMPLATE).read_text()
    token = (folder / "state" / "admin.token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    chance, count = random.Random(number), 0
    with (folder / f"acknowledged-{number}").open("w") as file:
        while not (folder / "stop").exists():
            bulk = BULK if chance.random() < BULK_SHARE else 1
            keys = [f"c{number}-{count + i}" for i in range(bulk)]
            jobs = [template.replace(NAME, key) for key in keys]
            count += bulk
            if bulk > 1:
                ids = acknowledged(port, "/v1/jobs:bulk", f'{{"submissions": [{", ".join(jobs)}]}}', headers)
            else:
                ids = acknowledged(port, "/v1/jobs", jobs[0], headers)
            file.writelines(f"{key} {job_id}\n" for key, job_id in zip(keys, ids, strict=True))
            file.flush()
            time.sleep(PAUSE_S)


def acknowledged(port: int, path: str, body: str, headers: dict[str, str]) -> list[str]:
    """Send a request until all its jobs are accepted; return their ids; raise if the server refuses it."""
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            status, text = request(port, "POST", path, body.encode(), headers)
            if status < 300:
                answer = json.loads(text)
                ids = [one["id"] for one in (answer if isinstance(answer, list) else [answer])]
                if None not in ids:
                    return ids
            elif status not in (429, 503):
                raise RuntimeError(f"{path}: {status} {text[:300]!r}")
        time.sleep(RETRY_S)


def request(port: int, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
    """Send one request on a connection of its own; return status and body of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


if __name__ == "__main__":
    main()
