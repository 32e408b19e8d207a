"""Certificates for tests: an authority, and what it issues."""

from __future__ import annotations

import datetime as dt
import functools
import ipaddress
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtensionOID, NameOID

_KINDS: dict[str, Callable[[str], x509.GeneralName]] = {
    "dns": x509.DNSName,
    "ip": lambda text: x509.IPAddress(ipaddress.ip_address(text)),
    "email": x509.RFC822Name,
    "uri": x509.UniformResourceIdentifier,
}

# An address of five bytes, and the name prometheus.example.
UNREADABLE_ADDRESS = x509.UnrecognizedExtension(
    ExtensionOID.SUBJECT_ALTERNATIVE_NAME, b"\x30\x1b\x87\x05\x01\x02\x03\x04\x05\x82\x12prometheus.example"
)


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, in PEM."""

    cert: str
    key: str

    def write(self, directory: Path, name: str) -> tuple[Path, Path]:
        """Writes `<name>.crt` and `<name>.key`; their paths."""
        cert, key = directory / f"{name}.crt", directory / f"{name}.key"
        cert.write_text(self.cert)
        key.write_text(self.key)
        return cert, key


SIGNS = x509.KeyUsage(
    key_cert_sign=True, crl_sign=True, digital_signature=False, content_commitment=False, key_encipherment=False,
    data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
)  # fmt: skip
"""What the key of an authority is for; Python 3.13 and newer ask."""


class Authority:
    """A certificate authority that lives as long as the test."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        built = _unsigned(self._name, self._name, self._key.public_key(), self._key)
        built = built.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.pem = _pem(built.add_extension(SIGNS, critical=True).sign(self._key, hashes.SHA256()))

    def issue(self, *names: str, extension: x509.UnrecognizedExtension | None = None) -> Issued:
        """A certificate for names such as `dns:localhost`, `ip:::1`, `email:a@b` and `uri:spiffe://c/d`, or with an extension."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "leaf")])
        built = _unsigned(subject, self._name, key.public_key(), self._key)
        if names:
            split = [name.partition(":") for name in names]
            built = built.add_extension(x509.SubjectAlternativeName([_KINDS[k](text) for k, _, text in split]), critical=False)
        if extension is not None:
            built = built.add_extension(extension, critical=False)
        return Issued(_pem(built.sign(self._key, hashes.SHA256())), key_pem(key))


@functools.cache
def authority(name: str = "ours") -> Authority:
    """One authority of each name for all tests."""
    return Authority(name)


def key_pem(key: ec.EllipticCurvePrivateKey, password: bytes | None = None) -> str:
    """A private key in PEM, encrypted with the password if there is one."""
    locked = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked).decode()


def client_context(*, trusts: Authority | None = None, shows: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    """The TLS side of a client that trusts an authority, ours by default, and shows a certificate."""
    context = ssl.create_default_context(cadata=(trusts or authority()).pem)
    if shows is not None:
        context.load_cert_chain(*shows)
    return context


def _unsigned(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, signer: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
