"""Who may ask: API keys, tenants, and the secret that keeps tenants' block names apart."""

from __future__ import annotations

import contextlib
import hmac
import os
from pathlib import Path

import msgspec

from anabranch.blocks.hashing import tenant_hash_key
from anabranch.core.authentication import is_loopback
from anabranch.core.errors import ConfigError, RequestError
from anabranch.serving.config import GatewayConfig

DEFAULT_TENANT = "default"
SECRET_FILE = "tenant-secret"
SECRET_BYTES = 32


class Tenants:
    """Maps API keys to tenants. Without keys everybody is tenant "default"."""

    def __init__(self, keys: dict[str, str], secret: bytes) -> None:
        self._keys = [(key.encode(), tenant) for key, tenant in keys.items()]
        self._secret = secret

    def authenticate(self, authorization: str | None) -> str:
        """The tenant of an `Authorization: Bearer …` header, decoded as Latin-1 (ASGI). Raises RequestError (401).

        Compares with every key, each in constant time, so that the answer's timing tells nothing about them.
        """
        if not self._keys:
            return DEFAULT_TENANT
        scheme, _, key = (authorization or "").partition(" ")
        given = key.strip().encode("latin-1", "replace") if scheme.lower() == "bearer" else b""
        tenant = None
        for known, owner in self._keys:
            if hmac.compare_digest(known, given):
                tenant = owner
        if tenant is None:
            what = "API key is wrong" if given else "no API key was sent; use 'Authorization: Bearer KEY'"
            raise RequestError(what, status=401, code="invalid_api_key")
        return tenant

    def hash_key(self, tenant: str) -> bytes:
        return tenant_hash_key(self._secret, tenant)


def load_keys(config: GatewayConfig) -> dict[str, str]:
    """Raises ConfigError for a file that cannot be used, and for a reachable address without keys."""
    if not config.api_keys_file:
        if not is_loopback(config.host):
            raise ConfigError(
                f"host = {config.host!r} is reachable from other machines; set api_keys_file, or bind to 127.0.0.1"
            )
        return {}
    path = Path(config.api_keys_file)
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"api_keys_file = {config.api_keys_file!r} is readable by others; run: chmod 600 {path}")
        keys = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except OSError as error:
        raise ConfigError(f"api_keys_file = {config.api_keys_file!r} cannot be used: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"api_keys_file = {config.api_keys_file!r} cannot be used: {error}") from error
    if not keys or not all(key and tenant for key, tenant in keys.items()):
        raise ConfigError(f"api_keys_file = {config.api_keys_file!r} must map at least one API key to a tenant name")
    return keys


def load_secret(directory: Path) -> bytes:
    """The cluster's secret, made on first use, readable by its owner only. Losing it loses the cache, nothing else."""
    path = directory / SECRET_FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            _publish(path, os.urandom(SECRET_BYTES))
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"{path} is readable by others; run: chmod 600 {path}")
        secret = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot keep the tenant secret in {path}: {error}") from error
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"{path} does not hold {SECRET_BYTES} bytes; delete it (cached blocks are then not found)")
    return secret


def _publish(path: Path, data: bytes) -> None:
    """Write the whole file or none of it; FileExistsError if somebody else did."""
    if path.exists():
        raise FileExistsError(path)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)
    finally:
        draft.unlink()
