"""`ApiAccess`: where an API server is and how this agent proves who it is, from a pod's own files or a kubeconfig."""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from isthmus.core.errors import InputError
from isthmus.core.files.validation_errors import suggest_name

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_MAX_FILE_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class ApiAccess:
    """The address of an API server and this agent's credentials there.

    A token that comes from `token_file` is read again for each request, since the one of a pod is renewed hourly.
    """

    server: str
    namespace: str = "default"
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    token: str = field(default="", repr=False)
    token_file: Path | None = None

    def headers(self) -> dict[str, str]:
        """Return the header that authenticates a request; empty with a client certificate."""
        token = self.token
        if self.token_file is not None:
            token = _read_text(self.token_file).strip()
        return {"Authorization": f"Bearer {token}"} if token else {}


def read_access(kubeconfig: str, context: str = "", *, folder: Path = SERVICE_ACCOUNT) -> ApiAccess:
    """Return the access of a kubeconfig's context, or, without a kubeconfig, that of the pod this agent runs in.

    Raises `InputError` for files that are missing, malformed, or ask for what is not supported: programs that print
    credentials, and servers whose certificate is not checked.
    """
    if kubeconfig:
        return _from_kubeconfig(Path(kubeconfig).expanduser(), context)
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (folder / "token").exists():
        raise InputError("this agent runs in no pod of a cluster", hint="set options.kubeconfig in site.yaml")
    return ApiAccess(
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        namespace=_read_text(folder / "namespace").strip() or "default",
        tls=_tls_context(_read_text(folder / "ca.crt"), str(folder / "ca.crt")),
        token_file=folder / "token",
    )


def _from_kubeconfig(file: Path, context: str) -> ApiAccess:
    try:
        document = yaml.safe_load(_read_text(file))
    except yaml.YAMLError as error:
        raise InputError(f"{file} is no YAML file") from error
    config = _mapping(document, file, "the file")
    chosen = context or str(config.get("current-context") or "")
    entry = _named(config, "contexts", "context", chosen, file)
    cluster = _named(config, "clusters", "cluster", str(entry.get("cluster", "")), file)
    user = _named(config, "users", "user", str(entry.get("user", "")), file)
    server = str(cluster.get("server", ""))
    if cluster.get("insecure-skip-tls-verify"):
        raise InputError(f"{file}: insecure-skip-tls-verify is set", hint="name the certificate of its authority")
    if not server.startswith("https://"):
        raise InputError(f"{file}: the server '{server}' is no https:// address")
    for method in ("exec", "auth-provider", "username", "impersonate", "as"):
        if user.get(method):
            raise InputError(f"{file}: credentials by '{method}' are not supported", hint="use a token or certificate")
    authority = _text_of(cluster, "certificate-authority", file)
    tls = _tls_context(authority or None, f"{file}: certificate-authority")
    certificate, key = _text_of(user, "client-certificate", file), _text_of(user, "client-key", file)
    if certificate:
        _load_certificate(tls, certificate, key, file)
    token_file = user.get("tokenFile")
    return ApiAccess(
        server=server.rstrip("/"),
        namespace=str(entry.get("namespace") or "default"),
        tls=tls,
        token="" if token_file else str(user.get("token") or ""),
        token_file=file.parent / str(token_file) if token_file else None,
    )


def _named(config: Mapping[str, Any], plural: str, singular: str, name: str, file: Path) -> Mapping[str, Any]:
    """Return the entry `name` of a kubeconfig's list."""
    entries = config.get(plural)
    found = {
        str(one.get("name")): one.get(singular)
        for one in (entries if isinstance(entries, list) else [])
        if isinstance(one, dict)
    }
    if name not in found:
        raise InputError(f"{file}: unknown {singular} '{name}'", hint=suggest_name(name, found))
    return _mapping(found[name], file, f"{singular} '{name}'")


def _mapping(value: object, file: Path, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{file}: {what} is no mapping")
    return value


def _text_of(entry: Mapping[str, Any], field_name: str, file: Path) -> str:
    """Return the text of a field that names a file, or that has its content in base64 under `FIELD-data`."""
    data, path = entry.get(f"{field_name}-data"), entry.get(field_name)
    if data:
        try:
            return base64.b64decode(str(data), validate=True).decode("ascii")
        except (binascii.Error, UnicodeDecodeError):
            raise InputError(f"{file}: {field_name}-data is no base64 text") from None
    return _read_text(file.parent / str(path)) if path else ""


def _tls_context(authority: str | None, place: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cadata=authority)
    except (ssl.SSLError, ValueError) as error:
        raise InputError(f"{place} is no certificate in PEM form") from error


def _load_certificate(tls: ssl.SSLContext, certificate: str, key: str, file: Path) -> None:
    """Load a client certificate, which Python reads from files only; none of them stays."""
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder, "certificate"), Path(folder, "key")
        for path, text in zip(paths, (certificate, key), strict=True):
            with open(path, "x", encoding="ascii", opener=lambda name, flags: os.open(name, flags, 0o600)) as stream:
                stream.write(text)
        try:
            tls.load_cert_chain(*paths)
        except (ssl.SSLError, OSError) as error:
            raise InputError(f"{file}: client certificate and key do not fit") from error


def _read_text(path: Path) -> str:
    try:
        with contextlib.closing(path.open("rb")) as stream:
            return stream.read(_MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'no text'}") from error
