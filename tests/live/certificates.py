"""A private authority and certificates of it, for tests."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from anabranch.core.live.tls import Tls


class Authority:
    def __init__(self, folder: Path, name: str = "test authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            self._builder(self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca = str(folder / f"{name.replace(' ', '-')}.pem")
        Path(self.ca).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, common_name: str, *uris: str, days: int = 1) -> tuple[str, str]:
        """Paths of a certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        builder = self._builder(subject, key, days)
        if uris:
            names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])
            builder = builder.add_extension(names, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        stem = self._folder / f"{len(list(self._folder.iterdir()))}"
        stem.with_suffix(".crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        private = stem.with_suffix(".key")
        private.touch(mode=0o600)
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return str(stem.with_suffix(".crt")), str(private)

    def tls(self, common_name: str, *uris: str, days: int = 1) -> Tls:
        return Tls(*self.issue(common_name, *uris, days=days), self.ca)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: int = 1) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=3))
            .not_valid_after(now + datetime.timedelta(days=days))
        )
