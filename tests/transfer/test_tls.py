"""TLS of a run: certificates of its own and of an authority, who is trusted, who is refused."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxrl_sync.inference.server import EngineServer, ServerConfig
from jaxrl_sync.orchestrator.engines import Engine, EngineClient, EngineGoneError
from jaxrl_sync.transfer import HubClient, Version, auth, tls
from jaxrl_sync.transfer.errors import AuthError, ResourceError
from jaxrl_sync.transfer.hub.server import run_hub
from tests.transfer.models import Rig, take, trainer_params
from tests.transfer.servers import dial, running_engine, running_hub


@pytest.mark.parametrize("secure", [False, True])
def test_listeners_for_everyone_are_loud_unless_they_speak_tls(
    token_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, secure: bool
) -> None:
    own = tls.of_run(tmp_path) if secure else None
    stop = threading.Event()
    run_hub("0.0.0.0", 0, token_file, stop=stop, announce=lambda url: stop.set(), tls=own)
    token = auth.load_token(token_file)
    with running_engine(token, ServerConfig(host="0.0.0.0", tls=own, name="e7")):
        pass
    loud = [r.getMessage() for r in caplog.records if "WITHOUT TLS" in r.getMessage()]
    assert [line.split(" LISTENS")[0] for line in loud] == ([] if secure else ["THE HUB", "e7"])


@pytest.fixture
def own(tmp_path: Path) -> tls.ServerTls:
    return tls.of_run(tmp_path)


def test_the_run_s_certificate_is_private_kept_and_no_authority(tmp_path: Path, own: tls.ServerTls) -> None:
    assert tls.of_run(tmp_path) == own
    assert own.key.stat().st_mode & 0o777 == 0o600 and own.key.parent.stat().st_mode & 0o777 == 0o700
    from cryptography import x509

    found = x509.load_pem_x509_certificate(own.cert.read_bytes())
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    with pytest.raises(ResourceError, match="can't keep a certificate"):
        tls.create_self_signed(own.cert.parent)
    own.key.chmod(0o640)
    with pytest.raises(ResourceError, match="expected -rw-------"):
        own.context()


@pytest.mark.parametrize("left", [["key.pem"], ["key.new"], ["key.pem", "cert.new"]])
def test_who_was_killed_while_it_made_a_certificate_blocks_nobody(tmp_path: Path, left: list[str]) -> None:
    (tmp_path / "tls").mkdir(mode=0o700)
    for name in left:
        (tmp_path / "tls" / name).touch(0o600)
    tls.of_run(tmp_path).context()  # a certificate and the key that it belongs to
    assert sorted(p.name for p in (tmp_path / "tls").iterdir()) == ["cert.pem", "key.pem"]


def test_weights_are_published_through_a_hub_with_tls(token_file: Path, own: tls.ServerTls) -> None:
    with running_hub(token_file, tls=own) as url:
        assert url.startswith("https://") and url.endswith(f"#sha256={own.fingerprint}")
        hub: Any = SimpleNamespace(url=url)
        with Rig(hub, token_file) as rig:
            params = trainer_params()
            rig.publisher(params).publish(params, Version("a", 0))
            assert take(rig.subscriber())[0] == Version("a", 0)


def test_a_hub_with_another_certificate_is_refused_before_the_token_is_sent(
    token_file: Path, own: tls.ServerTls, tmp_path: Path
) -> None:
    other = tls.create_self_signed(tmp_path / "other")
    with running_hub(token_file, tls=other) as url:
        place = url.partition("#")[0]
        for wrong in (own.vouched(place), place):
            begun = time.monotonic()
            with HubClient(wrong, token_file) as client, pytest.raises(AuthError, match="isn't trusted"):
                client.status()
            assert time.monotonic() - begun < 55, "not retried"
        with HubClient(url, token_file) as client:
            assert client.status()["epoch"]


@pytest.mark.parametrize(
    "url", ["http://h:1#sha256=" + "a" * 64, "https://h:1#sha256=abc", "https://h:1#x=y"]
)
def test_urls_that_ask_for_what_is_no_trust_are_refused(token_file: Path, url: str) -> None:
    with pytest.raises(AuthError, match="fragment|not https"):
        HubClient(url, token_file)


def test_plain_http_to_a_tls_port_harms_nobody(token_file: Path, own: tls.ServerTls) -> None:
    with running_hub(token_file, tls=own) as url:
        for _ in range(3):
            with dial(url) as sock:
                sock.sendall(b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n")
                sock.settimeout(60)
                with contextlib.suppress(ConnectionError):
                    assert not sock.recv(4096).startswith(b"HTTP/1.1 200")
        with HubClient(url, token_file) as client:
            assert client.members() == []


def test_old_protocols_are_not_spoken(token_file: Path, own: tls.ServerTls) -> None:
    with running_hub(token_file, tls=own) as url:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with pytest.warns(DeprecationWarning):
            context.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)), dial(url) as sock:
            context.wrap_socket(sock)


def test_an_engine_speaks_tls_to_the_loop(token_file: Path, own: tls.ServerTls, tmp_path: Path) -> None:
    token = auth.load_token(token_file)

    async def health(server: EngineServer, trusted: tls.ServerTls) -> dict[str, Any]:
        verify = tls.verify_of(trusted.vouched(server.url))
        client = EngineClient(token, connections=2, verify=verify)
        try:
            return await client.health(Engine("e", server.url, 1, 8), 60.0)
        finally:
            await client.close()

    with running_engine(token, ServerConfig(tls=own)) as server:
        assert server.url.startswith("https://")
        assert asyncio.run(health(server, own))["state"] == "ready"
        other = tls.create_self_signed(tmp_path / "other")
        with pytest.raises(EngineGoneError, match="certificate"):
            asyncio.run(health(server, other))


def test_certificates_of_an_authority_are_trusted_by_host_name(token_file: Path, tmp_path: Path) -> None:
    for hosts, trusted in ((["127.0.0.1"], True), (["10.9.9.9"], False)):
        signed = signed_by_authority(tmp_path / hosts[0], hosts)
        with running_hub(token_file, tls=signed) as url:
            assert url.endswith(f"#ca={signed.ca}")
            with HubClient(url, token_file) as client:
                if trusted:
                    assert client.status()["epoch"]
                else:
                    with pytest.raises(AuthError, match="isn't trusted"):
                        client.status()


def signed_by_authority(folder: Path, hosts: list[str]) -> tls.ServerTls:
    """A server certificate for some addresses, signed by an authority of its own."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    folder.mkdir()
    now = datetime.datetime.now(datetime.UTC)
    authority, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def build(subject: str, public: Any, ca: bool) -> x509.CertificateBuilder:
        usage = dict.fromkeys(
            ["content_commitment", "key_encipherment", "data_encipherment", "key_agreement"], False
        )
        more: dict[str, bool] = dict.fromkeys(["encipher_only", "decipher_only"], False)
        usage |= more | {"digital_signature": not ca, "key_cert_sign": ca, "crl_sign": ca}
        builder = x509.CertificateBuilder().subject_name(name(subject)).issuer_name(name("authority"))
        builder = builder.public_key(public).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
        builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        builder = builder.add_extension(x509.KeyUsage(**usage), critical=True)
        mine = x509.SubjectKeyIdentifier.from_public_key(public)
        theirs = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
        return builder.add_extension(mine, critical=False).add_extension(theirs, critical=False)

    addresses = [x509.IPAddress(ipaddress.ip_address(host)) for host in hosts]
    leaf = build("server", key.public_key(), ca=False)
    leaf = leaf.add_extension(x509.SubjectAlternativeName(addresses), critical=False)
    paths = tls.ServerTls(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
    root = build("authority", authority.public_key(), ca=True).sign(authority, hashes.SHA256())
    assert paths.ca is not None
    paths.ca.write_bytes(root.public_bytes(serialization.Encoding.PEM))
    paths.cert.write_bytes(leaf.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    paths.key.write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))
    paths.key.chmod(0o600)
    return paths
