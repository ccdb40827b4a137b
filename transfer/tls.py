"""TLS for control traffic: a server's certificate, and what a client trusts.

A URL says in its fragment, which never travels, what its certificate must be:

    https://hub:8443#sha256=<64 hex digits>   this certificate and no other (self-signed too, any host)
    https://hub:8443#ca=/path/ca.pem          one that this authority signed for that host
    https://hub:8443                          one that the system's authorities signed for that host

All HTTP servers of one run share what is trusted: with a pin they have one certificate, the run directory's.
"""

from __future__ import annotations

import dataclasses
import datetime
import errno
import hashlib
import hmac
import ipaddress
import os
import socket
import ssl
import stat
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

from jaxrl_sync.transfer.errors import AddressError, AuthError, ResourceError

VALID_DAYS = 3650
_PIN = "sha256"
_PIN_HEX = 64


@dataclasses.dataclass(frozen=True)
class ServerTls:
    """A certificate (chain) and its key, both PEM. The key's file must be readable by its owner alone.

    ``ca`` is the authority that clients are told to trust; without one they are told the certificate.
    """

    cert: Path
    key: Path
    ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """What a server needs: TLS 1.2 or later. ResourceError names a file that doesn't fit."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            mode = self.key.stat().st_mode
            if mode & 0o077:
                raise ResourceError(
                    f"key file {self.key} has mode {stat.filemode(mode)}, expected -rw-------"
                )
            context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ResourceError(f"certificate {self.cert} with key {self.key}: {error}") from error
        return context

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate, in hexadecimal."""
        try:
            first = self.cert.read_text(encoding="ascii").partition("-----END CERTIFICATE-----")
            der = ssl.PEM_cert_to_DER_cert(first[0] + first[1])
        except (OSError, ValueError) as error:
            raise ResourceError(f"certificate {self.cert}: {error}") from error
        return hashlib.sha256(der).hexdigest()

    def vouched(self, url: str) -> str:
        """``url`` (https) with what its clients are to trust: the authority, else this certificate alone."""
        return f"{url}#{_PIN}={self.fingerprint}" if self.ca is None else with_ca(url, str(self.ca))


@dataclasses.dataclass(frozen=True)
class Trust:
    """What a client takes for the server's certificate: one by ``fingerprint``, or those of ``ca``."""

    fingerprint: str | None = None
    ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """For a client. ResourceError when the authority's file can't be used."""
        if self.fingerprint is not None:
            return _pinning_context(self.fingerprint)
        try:
            return ssl.create_default_context(cafile=self.ca)
        except (OSError, ssl.SSLError) as error:
            raise ResourceError(f"certificates of {self.ca}: {error}") from error


def split_url(url: str) -> tuple[str, Trust]:
    """The URL to connect to and what its fragment says to trust. AddressError for what is no URL of an HTTP
    server, AuthError for another fragment."""
    parts = _parts(url)
    base = urllib.parse.urlunsplit(parts._replace(fragment="")).rstrip("/")
    key, _, value = parts.fragment.partition("=")
    if not parts.fragment:
        return base, Trust()
    if parts.scheme != "https":
        raise AuthError(f"{base} is not https, so nothing vouches for {key!r}")
    if key == "ca" and value:
        return base, Trust(ca=Path(urllib.parse.unquote(value)))
    if key == _PIN and len(value) == _PIN_HEX and not set(value.lower()) - set("0123456789abcdef"):
        return base, Trust(fingerprint=value.lower())
    raise AuthError(
        f"{base} has the fragment {parts.fragment[:100]!r}, expected sha256=<64 hex> or ca=<path>"
    )


def _parts(url: str) -> urllib.parse.SplitResult:
    try:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
        why = "" if "://" in url else ", found no scheme"
    except ValueError as error:  # of the host or the port
        why = f": {error}"
    raise AddressError(f"{url[:200]!r} is no URL, expected http://HOST:PORT or https://HOST:PORT{why}")


def with_ca(url: str, ca: str | None) -> str:
    """``url`` with an authority to trust, where it is https and says nothing itself."""
    plain = ca is None or not url.startswith("https:") or "#" in url
    return url if plain else f"{url}#ca={urllib.parse.quote(str(ca))}"


def verify_of(url: str) -> ssl.SSLContext | bool:
    """What httpx wants as ``verify`` for ``url`` and every other server of its run."""
    base, trust = split_url(url)
    return trust.context() if base.startswith("https:") else True


def why_untrusted(error: BaseException | None) -> str | None:
    """Why a connection failed, if it did because the certificate isn't trusted; looks at causes too."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return str(error.verify_message if hasattr(error, "verify_message") else error.args[-1])
        error = error.__cause__ or error.__context__
    return None


def of_run(run_dir: Path) -> ServerTls:
    """The run directory's own certificate: made the first time, kept by restarts and resumes."""
    folder = run_dir / "tls"
    found = ServerTls(folder / "cert.pem", folder / "key.pem")
    return found if found.cert.exists() else create_self_signed(folder)


def create_self_signed(folder: Path, hosts: Sequence[str] = ("localhost", "127.0.0.1", "::1")) -> ServerTls:
    """A new EC key and a certificate for it in ``folder``, which must not hold a certificate. ResourceError.

    It is no authority: nothing else can be signed with it. Clients pin its fingerprint. Whoever is killed in
    the middle leaves no certificate, and the next one begins again.
    """
    cert, key = _self_signed([*hosts, socket.gethostname()])
    tls = ServerTls(folder / "cert.pem", folder / "key.pem")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.path.lexists(tls.cert):
            raise FileExistsError(errno.EEXIST, "there is one already")
        for path, data in ((tls.key, key), (tls.cert, cert)):  # the certificate says that both are there
            partial = path.with_suffix(".new")
            partial.unlink(missing_ok=True)
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            partial.replace(path)
    except OSError as error:
        raise ResourceError(f"can't keep a certificate in {folder}: {error.strerror}") from error
    return tls


def _self_signed(hosts: Sequence[str]) -> tuple[bytes, bytes]:
    """Certificate and key as PEM."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ModuleNotFoundError as error:
        raise ResourceError(
            "a self-signed certificate needs the package 'cryptography': pip install 'jaxrl-sync[tls]'"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "jaxrl_sync run")])
    now = datetime.datetime.now(datetime.UTC)
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys(hosts):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private


def _check_pin(der: bytes | None, fingerprint: str) -> None:
    found = hashlib.sha256(der or b"").hexdigest()
    if not hmac.compare_digest(found, fingerprint):
        raise ssl.SSLCertVerificationError(
            f"the server's certificate is {found[:16]}..., expected {fingerprint[:16]}... (sha256)"
        )


def _pinning_context(fingerprint: str) -> ssl.SSLContext:
    """A context whose handshakes end well with one certificate only, before anything else is sent."""

    class PinnedSocket(ssl.SSLSocket):
        def do_handshake(self, block: bool = False) -> None:
            super().do_handshake(block)
            _check_pin(self.getpeercert(True), fingerprint)

    class PinnedObject(ssl.SSLObject):
        def do_handshake(self) -> None:
            super().do_handshake()
            _check_pin(self.getpeercert(True), fingerprint)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = (
        ssl.CERT_NONE
    )  # the pin is checked instead: names and dates of the certificate say nothing
    context.sslsocket_class = PinnedSocket
    context.sslobject_class = PinnedObject
    return context
