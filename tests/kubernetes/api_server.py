"""`ApiServer`: a real Kubernetes API server with Debian's etcd on loopback, built by `make kubernetes`.

Users are tokens: `admin`, who may do anything, and others, with the rights that a test gives them.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.free_ports import free_ports

PROGRAM = Path(sys.prefix) / "kubernetes" / "kube-apiserver"
_LEAN = (
    "--authorization-mode=AlwaysAllow", "--profiling=false",
    "--runtime-config=api/all=false,api/v1=true,apiregistration.k8s.io/v1=true,apiextensions.k8s.io/v1=true",
    "--enable-priority-and-fairness=false",
    ("--disable-admission-plugins=ServiceAccount,Priority,MutatingAdmissionWebhook,ValidatingAdmissionWebhook,"
    "RuntimeClass,DefaultStorageClass,CertificateApproval,CertificateSigning,CertificateSubjectRestriction,"
    "DefaultIngressClass,StorageObjectInUseProtection,PersistentVolumeClaimResize,ResourceQuota"),
)  # fmt: skip
AGENT = "system:serviceaccount:isthmus:isthmus-agent"
"""The account of the agent, as `deploy/kubernetes` names it."""

_ADMIN_TOKEN, _AGENT_TOKEN = "admin-token", "agent-token"


def missing_programs() -> list[str]:
    """Return what a real API server needs and this machine lacks."""
    missing = [] if PROGRAM.exists() else [f"{PROGRAM}: make kubernetes"]
    return missing + ([] if shutil.which("etcd") else ["etcd: apt-get install -y etcd-server"])


class ApiServer:
    """A server below `root`; `start` before use, `end` after.

    A `lean` one serves the group `v1` alone, without rights, so that it starts again in less time. Its storage, caches
    and watches are the same.
    """

    def __init__(self, root: Path, *, lean: bool = False) -> None:
        self.root, self._etcd, self._server, self._lean = root, None, None, lean
        (self._etcd_port, self._peer_port), self._port = free_ports(2), free_ports(1)[0]
        self.address = f"https://127.0.0.1:{self._port}"
        self._api: httpx.Client | None = None

    def start(self) -> None:
        """Start etcd and the API server; wait until it is ready."""
        for name in ("etcd", "certs"):
            (self.root / name).mkdir(parents=True)
        groups = f'{_ADMIN_TOKEN},admin,admin,system:masters\n{_AGENT_TOKEN},{AGENT},agent,"system:serviceaccounts"\n'
        (self.root / "tokens.csv").write_text(groups)
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        (self.root / "accounts.key").write_bytes(pem)
        url = f"http://127.0.0.1:{self._etcd_port}"
        peer = f"http://127.0.0.1:{self._peer_port}"
        self._etcd = self._run(
            "etcd", f"--data-dir={self.root}/etcd", f"--listen-client-urls={url}", f"--advertise-client-urls={url}",
            f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}", "--unsafe-no-fsync",
        )  # fmt: skip
        self.restart()

    def restart(self) -> None:
        """Start the API server, or start it again after `kill`; return when it answers."""
        root = self.root
        self._server = self._run(
            str(PROGRAM), f"--etcd-servers=http://127.0.0.1:{self._etcd_port}", "--bind-address=127.0.0.1",
            f"--secure-port={self._port}", f"--cert-dir={root}/certs", "--insecure-port=0",
            f"--token-auth-file={root}/tokens.csv", "--anonymous-auth=false",
            *(_LEAN if self._lean else ("--authorization-mode=RBAC",)),
            "--service-account-issuer=https://tests", f"--service-account-key-file={root}/accounts.key",
            f"--service-account-signing-key-file={root}/accounts.key", "--service-cluster-ip-range=10.0.0.0/24",
            *(() if self._lean else ("--disable-admission-plugins=ServiceAccount",)), "--endpoint-reconciler-type=none",
        )  # fmt: skip
        self._wait(lambda: self.api.get("/readyz").status_code == httpx.codes.OK)

    def kill(self) -> None:
        """End the API server with SIGKILL; etcd keeps what it acknowledged."""
        if self._server is not None:
            self._server.send_signal(signal.SIGKILL)
            self._server.wait(timeout=10)

    def compact(self) -> None:
        """Have etcd forget every version but the present one."""
        url = f"http://127.0.0.1:{self._etcd_port}/v3/kv"
        answer = httpx.post(f"{url}/range", json={"key": base64.b64encode(b"x").decode()}, trust_env=False).json()
        done = httpx.post(f"{url}/compaction", json={"revision": answer["header"]["revision"]}, trust_env=False)
        assert done.is_success or "has been compacted" in done.text, done.text

    def end(self) -> None:
        """End both programs."""
        for process in (self._server, self._etcd):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait(timeout=10)
        if self._api is not None:
            self._api.close()

    @property
    def api(self) -> httpx.Client:
        """A client of the admin's."""
        if self._api is None:
            certificate = self.root / "certs" / "apiserver.crt"
            self._wait(lambda: certificate.exists() and b"END" in certificate.read_bytes())
            tls = ssl.create_default_context(cafile=str(certificate))
            headers = {"Authorization": f"Bearer {_ADMIN_TOKEN}"}
            self._api = httpx.Client(base_url=self.address, verify=tls, headers=headers, timeout=20, trust_env=False)
        return self._api

    def kubeconfig(self, *, admin: bool = False) -> Path:
        """Write the kubeconfig of the agent, or of the admin; return its path."""
        authority = (self.root / "certs" / "apiserver.crt").read_bytes()
        file = self.root / ("admin.yaml" if admin else "agent.yaml")
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "tests",
            "contexts": [{"name": "tests", "context": {"cluster": "c", "user": "u", "namespace": "isthmus"}}],
            "clusters": [{"name": "c", "cluster": {
                "server": self.address, "certificate-authority-data": base64.b64encode(authority).decode()
            }}],
            "users": [{"name": "u", "user": {"token": _ADMIN_TOKEN if admin else _AGENT_TOKEN}}],
        }  # fmt: skip
        file.write_text(yaml.safe_dump(config))
        file.chmod(0o600)
        return file

    def apply(self, body: dict[str, Any], space: str = "") -> dict[str, Any]:
        """Create an object as the admin; one that is there stays."""
        version, kind = body["apiVersion"], body["kind"]
        prefix = f"/apis/{version}" if "/" in version else f"/api/{version}"
        plural = _PLURALS.get(kind, f"{kind.lower()}s")
        space = body["metadata"].get("namespace", space)
        path = f"{prefix}/namespaces/{space}/{plural}" if space else f"{prefix}/{plural}"
        answer = self.api.post(path, json=body)
        assert answer.is_success or answer.status_code == httpx.codes.CONFLICT, answer.text
        return answer.json()

    def put_node(self, body: dict[str, Any]) -> None:
        """Create a node with its status, which is a part of its own."""
        self.apply(body)
        path = f"/api/v1/nodes/{body['metadata']['name']}"
        headers = {"Content-Type": "application/merge-patch+json"}
        answer = self.api.patch(f"{path}/status", content=json.dumps({"status": body["status"]}), headers=headers)
        assert answer.is_success, answer.text
        # The server's own admission keeps a new node out until a controller, which is not here, has seen it.
        self.api.patch(path, content=json.dumps({"spec": {"taints": body["spec"].get("taints")}}), headers=headers)

    def _run(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.root / f"{Path(command[0]).name}.log").open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={"PATH": os.environ["PATH"], "HOME": str(self.root)}, cwd=self.root,
            )  # fmt: skip

    def _wait(self, holds: Any, timeout_s: float = 300.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if holds():
                    return
            assert time.monotonic() < deadline_s, f"the API server is not ready: {self.root}/kube-apiserver.log"
            time.sleep(0.1)


_PLURALS = {"PriorityClass": "priorityclasses", "WorkloadPriorityClass": "workloadpriorityclasses"}
