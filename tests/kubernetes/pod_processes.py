"""`PodProcesses`: a node for the tests: it runs the commands of bound pods as processes of this machine."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

_MARK = "ISTHMUS_TEST_POD"
_MERGE = {"Content-Type": "application/merge-patch+json"}


class PodProcesses:
    """Runs pods below `root`: volumes become folders there, whose paths replace those in a command."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._killed_after_s: dict[str, float] = {}

    def run(self, pods: Iterable[dict[str, Any]], api: httpx.Client) -> None:
        """Start what was bound, end what is deleted, report what has ended."""
        found = {pod["metadata"]["uid"]: pod for pod in pods if pod["spec"].get("nodeName")}
        for uid, pod in found.items():
            phase = (pod.get("status") or {}).get("phase", "Pending")
            if "deletionTimestamp" in pod["metadata"]:
                self._end_deleted(uid, pod, api)
            elif uid not in self._running and phase == "Pending":
                self._start(uid, pod, api)
            elif uid in self._running and phase == "Running" and self._running[uid].poll() is not None:
                _kill_all(uid)
                self._report(pod, api, "Succeeded" if self._running[uid].returncode == 0 else "Failed")
        for uid in self._running.keys() - found.keys():
            _kill_all(uid)

    def end(self) -> None:
        """End every process of every pod."""
        for uid, process in self._running.items():
            _kill_all(uid)
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=10)

    def _start(self, uid: str, pod: dict[str, Any], api: httpx.Client) -> None:
        folder, places = self._root / uid, dict[str, str]()
        container = pod["spec"]["containers"][0]
        volumes = {one["name"]: one for one in pod["spec"].get("volumes") or ()}
        for mount in container.get("volumeMounts") or ():
            place = folder / mount["name"]
            place.mkdir(parents=True, exist_ok=True)
            places[mount["mountPath"]] = str(place)
            if "secret" in volumes.get(mount["name"], {}):
                name = volumes[mount["name"]]["secret"]["secretName"]
                answer = api.get(f"/api/v1/namespaces/{pod['metadata']['namespace']}/secrets/{name}")
                if not answer.is_success:  # as with a kubelet, the pod waits for it
                    shutil.rmtree(folder)
                    return
                for key, value in answer.json()["data"].items():
                    (place / key).write_bytes(base64.b64decode(value))
        variables = {one["name"]: str(one.get("value", "")) for one in container.get("env") or ()}
        command = [_replaced(word, variables, places) for word in (*container["command"], *container.get("args", ()))]
        command[0] = sys.executable if command[0] == "python3" else command[0]
        log = (folder / "container.log").open("ab")
        environment = {**os.environ, **variables, _MARK: uid}
        with log:
            self._running[uid] = subprocess.Popen(
                command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self._report(pod, api, "Running")

    def _end_deleted(self, uid: str, pod: dict[str, Any], api: httpx.Client) -> None:
        process = self._running.get(uid)
        if process is not None and process.poll() is None:
            if uid not in self._killed_after_s:
                grace_s = pod["metadata"].get("deletionGracePeriodSeconds") or 0
                self._killed_after_s[uid] = time.monotonic() + grace_s
                os.kill(process.pid, signal.SIGTERM)
            if time.monotonic() < self._killed_after_s[uid]:
                return
        _kill_all(uid)
        api.request("DELETE", _path(pod), json={"gracePeriodSeconds": 0})

    def _report(self, pod: dict[str, Any], api: httpx.Client, phase: str) -> None:
        answer = api.patch(f"{_path(pod)}/status", json={"status": {"phase": phase}}, headers=_MERGE)
        if answer.is_success:
            pod["status"] = {**(pod.get("status") or {}), "phase": phase}


def _path(pod: dict[str, Any]) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def _replaced(word: str, variables: dict[str, str], places: dict[str, str]) -> str:
    for name, value in variables.items():
        word = word.replace(f"$({name})", value)
    for place in sorted(places, key=len, reverse=True):
        if word == place or word.startswith(f"{place}/"):
            return places[place] + word[len(place) :]
    return word


def _kill_all(uid: str) -> None:
    """Kill every process of a pod, as the end of its control group does."""
    for process in _of_pod(uid):
        with contextlib.suppress(psutil.Error):
            process.kill()


def _of_pod(uid: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == uid:
                yield process
