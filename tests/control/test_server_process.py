"""Starting and ending a server: ports, folders, disks, certificates; what fails leaves nothing behind."""

from __future__ import annotations

import datetime
import hashlib
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from isthmus.control.server.listen_addresses import printed_hosts
from isthmus.control.server.run_server import ServerConfig, ServerInfo, load_certificate, run_server
from isthmus.control.server.tls import Certificate, given_certificate, self_signed_certificate
from isthmus.core.errors import InputError, UnavailableError
from tests.full_disk import full_disk

pytestmark = pytest.mark.integration

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


@contextmanager
def served(config: ServerConfig) -> Iterator[ServerInfo]:
    """A server in a thread of this process, ended at the end."""
    stop, ready = threading.Event(), threading.Event()
    told: list[ServerInfo] = []

    def announce(listening: ServerInfo) -> None:
        told.append(listening)
        ready.set()

    thread = threading.Thread(target=run_server, args=(config, announce), kwargs={"stop": stop})
    thread.start()
    try:
        assert ready.wait(20)
        yield told[0]
    finally:
        stop.set()
        thread.join(20)
    assert not thread.is_alive()


def test_a_server_listens_on_loopback_and_lets_go_of_everything(tmp_path: Path) -> None:
    """Health answers; after the end port and state folder can be had again at once."""
    with served(ServerConfig(state=tmp_path / "s", port=0)) as first:
        assert httpx.get(f"{first.url}/v1/health").status_code == 200
        assert first.url.startswith("http://127.0.0.1:")
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700
    again = ServerConfig(state=tmp_path / "s", port=httpx.URL(first.url).port or 0)
    with served(again) as second:
        assert second.url == first.url


def test_a_port_in_use_is_named_and_nothing_is_made(tmp_path: Path) -> None:
    """The address is tried before the state folder is: no file is left."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UnavailableError, match=f"127.0.0.1:{port}") as raised:
            run_server(ServerConfig(state=tmp_path / "s", port=port))
    assert "--port" in str(raised.value.hint)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("port", [-1, 70_000])
def test_a_port_that_cannot_be_is_refused(tmp_path: Path, port: int) -> None:
    """A number that is no port is an error in words."""
    with pytest.raises(UnavailableError, match=str(port)):
        run_server(ServerConfig(state=tmp_path / "s", port=port))


def test_a_second_server_on_the_same_state_is_turned_away(tmp_path: Path) -> None:
    """Two servers never decide over one store."""
    with (
        served(ServerConfig(state=tmp_path, port=0)),
        pytest.raises(UnavailableError, match="another server uses"),
    ):
        run_server(ServerConfig(state=tmp_path, port=0))


def test_a_state_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    """A file where the folder should be: the path and what to do."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="file") as raised:
        run_server(ServerConfig(state=tmp_path / "file", port=0))
    assert "choose a writable folder" in str(raised.value.hint)


def test_a_full_disk_at_the_start_is_named_and_the_port_is_free_again(tmp_path: Path) -> None:
    """The store cannot be made: `UnavailableError`, and neither lock nor port is kept."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = ServerConfig(state=tmp_path / "s", port=port)
    with full_disk(), pytest.raises(UnavailableError, match=str(tmp_path)):
        run_server(config)
    with served(config) as listening:
        assert httpx.get(f"{listening.url}/v1/health").status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "example.org"])
def test_beyond_loopback_there_is_no_server_without_tls(tmp_path: Path, host: str) -> None:
    """Refused with the three ways out, before anything is written."""
    with pytest.raises(InputError, match="TLS is not configured") as raised:
        load_certificate(ServerConfig(state=tmp_path, host=host))
    assert "self-signed" in str(raised.value.hint)
    assert list(tmp_path.iterdir()) == []


def test_every_printed_url_of_a_self_signed_server_works_with_the_printed_ca(tmp_path: Path) -> None:
    """A client that verifies names gets through by each URL as printed; one without the CA does not."""
    config = ServerConfig(state=tmp_path, host="0.0.0.0", port=0, self_signed=True)
    with served(config) as listening:
        assert listening.certificate is not None
        assert listening.certificate.trust is not None
        trusting = ssl.create_default_context(cafile=str(listening.certificate.trust))
        own = {one.address for found in psutil.net_if_addrs().values() for one in found}
        port = httpx.URL(listening.url).port
        for url in (listening.url, *listening.other_urls):
            assert httpx.URL(url).host in own
            assert httpx.get(f"{url}/v1/health", verify=trusting, trust_env=False).status_code == 200
        for host in ("localhost", "127.0.0.1"):
            assert httpx.get(f"https://{host}:{port}/v1/health", verify=trusting).status_code == 200
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"https://127.0.0.1:{port}/v1/health")
        text = listening.certificate.trust.read_bytes()
        digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(text.decode())).hexdigest().upper()
        assert listening.certificate.fingerprint.replace(":", "") == digest
    for name in ("key.pem", "ca-key.pem"):
        assert stat.S_IMODE((tmp_path / "tls" / name).stat().st_mode) == 0o600


def test_the_url_of_a_server_with_a_certificate_of_a_ca_has_a_name_of_the_certificate(tmp_path: Path) -> None:
    """The certificate names `pool.example`: this is printed, and works for a client that trusts the CA."""
    own = self_signed_certificate(tmp_path / "ca", ("pool.example",), datetime.datetime.now(datetime.UTC))
    config = ServerConfig(state=tmp_path / "s", host="0.0.0.0", port=0, tls_cert=own.cert, tls_key=own.key)
    with served(config) as listening:
        assert listening.certificate is not None
        assert listening.certificate.trust is None
        assert httpx.URL(listening.url).host == "pool.example"
        context = ssl.create_default_context(cafile=str(own.trust))
        port = httpx.URL(listening.url).port or 0
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            context.wrap_socket(plain, server_hostname="pool.example") as secure,
        ):
            assert secure.version() == "TLSv1.3"


def test_a_certificate_is_kept_until_it_no_longer_serves(tmp_path: Path) -> None:
    """The same one at every start; a new one for a new host, or when the old one runs out; always the same CA."""
    first = self_signed_certificate(tmp_path, ("10.0.0.1", "pool"), NOW)
    kept, ca = first.cert.read_bytes(), first.fingerprint
    assert self_signed_certificate(tmp_path, ("10.0.0.1",), NOW).cert.read_bytes() == kept
    other = self_signed_certificate(tmp_path, ("10.0.0.2",), NOW)
    reissued = other.cert.read_bytes()
    assert other.hosts == ("10.0.0.2",)
    late = self_signed_certificate(tmp_path, ("10.0.0.2",), NOW + datetime.timedelta(days=397))
    assert late.cert.read_bytes() != reissued
    assert late.fingerprint == ca
    assert self_signed_certificate(tmp_path, ("a",), NOW + datetime.timedelta(days=3600)).fingerprint != ca


def test_a_self_signed_certificate_from_before_the_ca_stays_trusted(tmp_path: Path) -> None:
    """Clients have a copy of `cert.pem` itself: a server with such a folder keeps it, and prints it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "isthmus")])
    old = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, NOW, NOW + datetime.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("pool")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (tmp_path / "cert.pem").write_bytes(old.public_bytes(Encoding.PEM))
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "key.pem").write_bytes(pem)
    kept = self_signed_certificate(tmp_path, ("pool",), NOW)
    assert kept.trust == kept.cert
    assert given_certificate(kept.cert, kept.key) == kept
    new = self_signed_certificate(tmp_path, ("pool", "10.0.0.1"), NOW)
    assert new.trust == tmp_path / "ca.pem"


def test_a_certificate_without_its_ca_is_replaced(tmp_path: Path) -> None:
    """Clients could trust nothing else: the server makes a new CA and a certificate by it."""
    made = self_signed_certificate(tmp_path, ("10.0.0.1",), NOW).fingerprint
    (tmp_path / "ca.pem").unlink()
    assert self_signed_certificate(tmp_path, ("10.0.0.1",), NOW).fingerprint != made
    assert (tmp_path / "ca.pem").exists()


@pytest.mark.parametrize(
    ("host", "valid", "printed"),
    [
        ("10.0.0.1", ("10.0.0.1", "localhost"), ("10.0.0.1",)),
        ("10.0.0.1", ("pool.example", "localhost"), ("pool.example",)),
        ("10.0.0.1", (), ("10.0.0.1",)),
        ("127.0.0.1", None, ("127.0.0.1",)),
    ],
)
def test_the_printed_host_is_one_that_the_certificate_names(
    host: str, valid: tuple[str, ...] | None, printed: tuple[str, ...]
) -> None:
    """The listen address if the certificate has it, else the certificate's names."""
    assert printed_hosts(host, valid) == printed


def test_the_operators_certificate_must_be_one(tmp_path: Path) -> None:
    """Missing half, missing file, not a certificate: each is an `InputError` that names the file."""
    good = self_signed_certificate(tmp_path / "good", ("localhost",), NOW)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(InputError, match="both a certificate and its key"):
        load_certificate(ServerConfig(state=tmp_path, tls_cert=good.cert))
    for cert in (tmp_path / "none", tmp_path / "text"):
        with pytest.raises(InputError, match=cert.name):
            load_certificate(ServerConfig(state=tmp_path, tls_cert=cert, tls_key=good.key))
    given = ServerConfig(state=tmp_path, host="0.0.0.0", tls_cert=good.cert, tls_key=good.key)
    assert load_certificate(given) == Certificate(cert=good.cert, key=good.key)  # of a CA that the operator knows


def test_the_admins_token_is_in_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a server says at its start, the token is only in its file."""
    with caplog.at_level("DEBUG"), served(ServerConfig(state=tmp_path, port=0)) as listening:
        token = listening.admin_token.read_text().strip()
        answer = httpx.get(f"{listening.url}/v1/jobs", headers={"Authorization": f"Bearer {token}"})
    assert answer.json() == []
    assert token not in caplog.text
    assert token.encode() not in (tmp_path / "isthmus.db").read_bytes()
