"""Secrets and tenants from where they are kept: files that only their owner can read.

**Covers** reading, making, and the errors that name the file and the remedy. **Does not cover** what a secret opens
(`core.authentication`).
"""

from __future__ import annotations

import os
import secrets
import tomllib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from anabranch.core.authentication import MAX_NAME_BYTES, Access, Credentials, TenantRules
from anabranch.core.config import file_entries, refuse, resolve
from anabranch.core.errors import ConfigError
from anabranch.core.live.tls import Tls
from anabranch.store.values.config import SecurityConfig

LEAST_SECRET_BYTES = 32
_PATH_STARTS = ("./", "../", "~/")
_PATH_ENDS = (".secret", ".key", ".pem", ".txt")


class TenantEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One table of the tenants file."""

    secret: Annotated[str, Meta(description="At least 32 characters; or secret_file.")] = ""
    secret_file: Annotated[str, Meta(description="File of the secret; a relative path starts at the tenants file.")] = (
        ""
    )
    quota_bytes: Annotated[int, Meta(ge=0, description="DRAM and SSD that it may fill on each node; 0 = no limit.")] = 0
    pin_quota_bytes: Annotated[int, Meta(ge=0, description="Of it, what it may pin; 0 = no limit.")] = 0
    encrypt: Annotated[bool, Meta(description="What leaves DRAM is encrypted with the tenant's own key.")] = False


def access_of(config: SecurityConfig) -> Access:
    """The rules of a node or directory. Raises ConfigError naming every file that cannot be used."""
    cluster = read_secret(config.secret_file, "security.secret_file") if config.secret_file else b""
    tenants = read_tenants(config.tenants_file) if config.tenants_file else {}
    tls = bool(config.tls_cert or config.tls_key or config.tls_ca)
    if not cluster and not tls and (named := [name for name, rules in tenants.items() if rules.secret]):
        raise ConfigError(
            f"{config.tenants_file} gives {named[0]} a secret and security.secret_file is empty: nodes and "
            "administrators need the cluster's (`anabranch store secret new FILE`)"
        )
    known = [rules.secret for rules in tenants.values() if rules.secret] + ([cluster] if cluster else [])
    if len(set(known)) < len(known):
        raise ConfigError(f"two secrets of {config.tenants_file} and security.secret_file are equal: make one for each")
    return Access(cluster_secret=cluster, tenants=tenants, tls=tls)


def tls_of(config: SecurityConfig) -> Tls | None:
    """None if no security.tls_* is set. Raises ConfigError."""
    if not (config.tls_cert or config.tls_key or config.tls_ca):
        return None
    return Tls(config.tls_cert, config.tls_key, config.tls_ca)


def credentials_of(
    config: SecurityConfig, tenant: str = "default", namespace: str = "default", epoch: str = ""
) -> Credentials:
    """What a client, a node or an administrator shows: `secret_file` holds the tenant's or the cluster's secret."""
    secret = read_secret(config.secret_file, "security.secret_file") if config.secret_file else b""
    return Credentials(secret=secret, tenant=tenant, namespace=namespace, epoch=epoch)


def read_secret(path: str, setting: str) -> bytes:
    """The bytes of a file without the line's end. Raises ConfigError if others can read it or it is too short."""
    data = _private_bytes(path, setting).rstrip(b"\r\n")
    if len(data) < LEAST_SECRET_BYTES:
        raise ConfigError(
            f"{setting} {path} has {len(data)} bytes, a secret has at least {LEAST_SECRET_BYTES}: "
            "`anabranch store secret new FILE` makes one"
        )
    return data


def read_tenants(path: str) -> dict[str, TenantRules]:
    """Tenants by name. Raises ConfigError naming every problem of the file."""
    try:
        table = tomllib.loads(_private_bytes(path, "security.tenants_file").decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"security.tenants_file {path} is not valid TOML: {error}") from error
    entries, problems = file_entries(table, path)
    resolved = resolve(dict.fromkeys(table, TenantEntry), entries)
    refuse([*problems, *resolved.problems, *(p for name in table if (p := _bad_name(name, path)))])
    return {name: _rules(path, name, entry) for name, entry in resolved.sections.items()}


def new_secret(path: str) -> None:
    """A new file, mode 0600, with 256 random bits as text. Raises ConfigError if there is a file already."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists: a new secret would lock out who uses it; choose another name") from error
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    with os.fdopen(file, "w") as out:
        out.write(secrets.token_urlsafe(32) + "\n")
        out.flush()
        os.fsync(out.fileno())


def _private_bytes(path: str, setting: str) -> bytes:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(1 << 20)
    except OSError as error:
        raise ConfigError(f"{setting} {path}: {error.strerror}") from error
    if mode & 0o077:
        raise ConfigError(f"{setting} {path} can be read by others: run `chmod 600 {path}`")
    return data


def _bad_name(name: str, path: str) -> str:
    fits = 0 < len(name.encode()) <= MAX_NAME_BYTES and name.isprintable()
    return "" if fits else f"{name!r} in {path} is no tenant's name: 1 to {MAX_NAME_BYTES} printable bytes"


def _rules(path: str, name: str, entry: msgspec.Struct) -> TenantRules:
    if not isinstance(entry, TenantEntry):
        raise TypeError(f"{type(entry).__name__} is not a TenantEntry")
    if entry.secret and entry.secret_file:
        raise ConfigError(f"{name} in {path} has both secret and secret_file: keep one")
    if _is_path(entry.secret, Path(path).parent):
        raise ConfigError(
            f"{name}.secret in {path} looks like the path of a file, and would be the secret itself: name the file in "
            "secret_file"
        )
    secret = entry.secret.encode()
    if secret and len(secret) < LEAST_SECRET_BYTES:
        raise ConfigError(f"{name}.secret in {path} is too short: at least {LEAST_SECRET_BYTES} characters")
    if entry.secret_file:
        secret = read_secret(str(Path(path).parent / entry.secret_file), f"{name}.secret_file")
    if entry.quota_bytes and entry.pin_quota_bytes > entry.quota_bytes:
        raise ConfigError(f"{name}.pin_quota_bytes in {path} exceeds its quota_bytes")
    return TenantRules(
        secret=secret, quota_bytes=entry.quota_bytes, pin_quota_bytes=entry.pin_quota_bytes, encrypt=entry.encrypt
    )


def _is_path(secret: str, folder: Path) -> bool:
    """Nobody means a path to be the secret, and everybody could guess it."""
    looks = secret.startswith(_PATH_STARTS) or secret.endswith(_PATH_ENDS)
    return bool(secret) and (looks or os.path.isfile(folder / secret) or os.path.isfile(secret))
