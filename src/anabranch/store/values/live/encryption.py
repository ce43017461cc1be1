"""Per-tenant encryption of what leaves DRAM: AES-256-GCM, one data key a tenant, gone for good when it is forgotten.

    key file    <folder>/<digest of tenant>.key, mode 0600: the tenant's scopes, and its data key wrapped with the
                cluster secret
    sealed      key id (8) · salt (24) · for each slice of SLICE_BYTES: ciphertext, tag (16)

Every value has a key of its own, BLAKE3(data key, salt), and slice n of it the nonce n. A nonce therefore repeats only
if two of a tenant's values draw the same 192 random bits, which takes about 2^96 values; random 96-bit nonces under one
key would allow 2^32 slices (NIST SP 800-38D, 8.3). The associated data name value, scope, size and slice: a slice moved
to another place, or another value, does not open.

Nodes that share a backing tier share `folder` too; else it is the node's own. Who deletes a key file makes all of the
tenant's values unreadable at once, on every node that shares the folder. **Does not cover** DRAM, or what the cluster
secret and an old copy of the key file together can open.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator

import msgspec
from blake3 import blake3

from anabranch.core.errors import ConfigError, IntegrityError, MissingExtra, StaleLease
from anabranch.store.values.contracts import Record
from anabranch.store.values.scope import SCOPE_BYTES
from anabranch.store.values.slices import SLICE_BYTES, slice_bounds, slice_count

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
except ModuleNotFoundError as error:
    raise MissingExtra("security", "cryptography") from error

KEY_ID_BYTES, SALT_BYTES, TAG_BYTES, NONCE_BYTES = 8, 24, 16, 12
HEAD_BYTES = KEY_ID_BYTES + SALT_BYTES
MIN_SECRET_BYTES = 32
SETTLED_NS = 2_000_000_000
MAX_UNKNOWN = 10_000
_WRAP_CONTEXT = "anabranch 2026-12-01 wrapping of tenants' data keys v1"
_FILE_CONTEXT = "anabranch 2026-12-01 names of key files v1"
_PLACE = struct.Struct("<QQI")  # size, slice, slices


class _KeyFile(msgspec.Struct, frozen=True):
    """`wrapped`: nonce and sealed data key. `plain`: this tenant's new values are not encrypted."""

    version: int
    tenant: str
    key_id: bytes
    wrapped: bytes
    scopes: list[bytes]
    plain: bool = False


class _Key(msgspec.Struct, frozen=True):
    """`stamp`: inode and time of the file it was read from; another one there means another life of the tenant."""

    path: str
    stamp: tuple[int, int]
    key_id: bytes
    data_key: bytes
    plain: bool


class TenantCiphers:
    """`contracts.Cipher`. A scope is encrypted once `admit` named its tenant, here or on a node that shares the folder.

    `strict`: a scope nobody admitted is refused (StaleLease) instead of left in the clear: for clusters in which any
    tenant is encrypted, as nodes also hold replicas for tenants they never met. Thread-safe.

    Raises ConfigError for a secret under 32 bytes, a folder that cannot be used, key files of another secret.
    """

    def __init__(self, folder: str, secret: bytes, *, strict: bool = False) -> None:
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(f"the cluster secret must have at least {MIN_SECRET_BYTES} bytes, got {len(secret)}")
        self._folder = folder
        self._strict = strict
        self._wrapping = AESGCM(blake3(secret, derive_key_context=_WRAP_CONTEXT).digest())
        self._lock = threading.Lock()
        self._keys: dict[bytes, _Key] = {}  # by scope
        self._unknown: dict[bytes, tuple[int, int]] = {}
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"key folder {folder} cannot be used: {error.strerror}; name another one") from error
        self._learn()

    # --- tenants ------------------------------------------------------------------------------------------------

    def admit(self, tenant: str, scope: bytes, *, encrypt: bool = True) -> None:
        """From now on, values of this scope belong to this tenant; its key is made if there is none (also after
        `forget`: a new one). `encrypt` False: its new values stay in the clear, sealed ones can still be opened. Raises
        OSError."""
        if len(scope) != SCOPE_BYTES:
            raise ConfigError(f"a scope has {SCOPE_BYTES} bytes, this one has {len(scope)}")
        with self._lock:
            key = self._keys.get(scope)
            if key is not None and key.plain is not encrypt and self._is_there(key):
                return
            with self._exclusive():
                path = self._path(tenant)
                found = self._load(path) or self._new(tenant)
                if scope not in found.scopes or found.plain is encrypt:
                    scopes = sorted({*found.scopes, scope})
                    found = msgspec.structs.replace(found, scopes=scopes, plain=not encrypt)
                    self._save(path, found)
                self._take(path, found, _stamp(path))

    def forget(self, tenant: str) -> bool:
        """Delete the tenant's key: nothing of it that was sealed can be opened again. False if it had none. Raises
        OSError: then it may still be there."""
        path = self._path(tenant)
        with self._lock, self._exclusive():
            try:
                os.unlink(path)
            except FileNotFoundError:
                return False
            self._sync_folder()
            return True

    # --- contracts.Cipher ---------------------------------------------------------------------------------------

    def overhead(self, scope: bytes, size: int) -> int:
        return 0 if self._sealing_key(scope) is None else HEAD_BYTES + TAG_BYTES * max(1, slice_count(size))

    def seal(self, record: Record, data: memoryview) -> bytes | memoryview:
        """Raises StaleLease if the scope's key is gone, or nobody admitted it and that is not allowed."""
        key = self._sealing_key(record.scope)
        if key is None:
            return data
        salt = os.urandom(SALT_BYTES)
        cipher = _value_cipher(key, salt)
        sealed = memoryview(bytearray(record.size + HEAD_BYTES + TAG_BYTES * max(1, slice_count(record.size))))
        sealed[:HEAD_BYTES] = key.key_id + salt
        at = HEAD_BYTES
        for number, start, end in _slices(record.size):
            length = end - start + TAG_BYTES
            cipher.encrypt_into(_nonce(number), data[start:end], _place(record, number), sealed[at : at + length])
            at += length
        return sealed

    def open(self, record: Record, data: memoryview) -> bytes | memoryview:
        key = self._key(record.scope)
        if key is None:
            raise StaleLease("nobody said whose scope this is, or its key was forgotten")
        if data.nbytes < HEAD_BYTES:
            raise IntegrityError("a sealed value is cut off")
        if bytes(data[:KEY_ID_BYTES]) != key.key_id:
            raise StaleLease("the key of this value was forgotten")
        if data.nbytes != record.size + HEAD_BYTES + TAG_BYTES * max(1, slice_count(record.size)):
            raise IntegrityError("a sealed value has the wrong length")
        cipher = _value_cipher(key, bytes(data[KEY_ID_BYTES:HEAD_BYTES]))
        plain = memoryview(bytearray(record.size))
        at = HEAD_BYTES
        for number, start, end in _slices(record.size):
            length = end - start + TAG_BYTES
            try:
                cipher.decrypt_into(_nonce(number), data[at : at + length], _place(record, number), plain[start:end])
            except InvalidTag as error:
                raise IntegrityError("a sealed value was changed") from error
            at += length
        return plain

    # --- keys ---------------------------------------------------------------------------------------------------

    def _sealing_key(self, scope: bytes) -> _Key | None:
        """None: values of this scope stay in the clear."""
        key = self._key(scope)
        if key is None and self._strict:
            raise StaleLease("nobody said whose scope this is, or its key was forgotten")
        return None if key is None or key.plain else key

    def _key(self, scope: bytes) -> _Key | None:
        """None for a scope that nobody admitted. Raises StaleLease if its key was forgotten."""
        key = self._keys.get(scope)
        if key is None and self._nothing_new(scope):
            return None
        if key is None or not self._is_there(key):
            with self._lock:
                self._learn()  # admitted by another node; deleted; or replaced by a new one
                key = self._keys.get(scope)
            if key is not None and not self._is_there(key):
                raise StaleLease("the key of this scope was forgotten")
        return key

    def _nothing_new(self, scope: bytes) -> bool:
        """This scope was looked for in vain, and the folder has not changed since, nor so lately that its time stamp
        might hide a second change."""
        stamp = _stamp(self._folder)
        if self._unknown.get(scope) == stamp:
            return True
        if time.time_ns() - stamp[1] > SETTLED_NS:
            if len(self._unknown) >= MAX_UNKNOWN:
                self._unknown.clear()
            self._unknown[scope] = stamp  # before the folder is read: a later change shows
        return False

    @staticmethod
    def _is_there(key: _Key) -> bool:
        try:
            return _stamp(key.path) == key.stamp
        except FileNotFoundError:
            return False

    def _learn(self) -> None:
        """Read all key files. A scope whose file is gone keeps its key's path, so that it is known as forgotten."""
        for name in os.listdir(self._folder):
            path = os.path.join(self._folder, name)
            if name.endswith(".key"):
                with contextlib.suppress(FileNotFoundError):
                    stamp = _stamp(path)  # before the file is read: a later change shows
                    found = self._load(path)
                    if found is not None:
                        self._take(path, found, stamp)

    def _take(self, path: str, found: _KeyFile, stamp: tuple[int, int]) -> None:
        nonce, wrapped = found.wrapped[:NONCE_BYTES], found.wrapped[NONCE_BYTES:]
        try:
            data_key = self._wrapping.decrypt(nonce, wrapped, _owner(found.tenant, found.key_id))
        except InvalidTag as error:
            raise ConfigError(
                f"{path} was written under another cluster secret: give this node the same secret, or delete the"
                " file and lose what its tenant has on disk"
            ) from error
        key = _Key(path, stamp, found.key_id, data_key, found.plain)
        for scope in found.scopes:
            self._keys[scope] = key

    def _new(self, tenant: str) -> _KeyFile:
        key_id, nonce = os.urandom(KEY_ID_BYTES), os.urandom(NONCE_BYTES)
        wrapped = self._wrapping.encrypt(nonce, os.urandom(32), _owner(tenant, key_id))
        return _KeyFile(1, tenant, key_id, nonce + wrapped, [])

    def _load(self, path: str) -> _KeyFile | None:
        try:
            with open(path, "rb") as file:
                return msgspec.msgpack.decode(file.read(), type=_KeyFile)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path} is not a key file; move it away") from error

    def _save(self, path: str, content: _KeyFile) -> None:
        temporary = f"{path}.{os.getpid()}.tmp"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(msgspec.msgpack.encode(content))
            file.flush()
            os.fsync(fd)
        os.rename(temporary, path)
        self._sync_folder()

    def _path(self, tenant: str) -> str:
        return os.path.join(
            self._folder, blake3(tenant.encode(), derive_key_context=_FILE_CONTEXT).hexdigest()[:32]
        ) + (".key")

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Nodes that share the folder change it one after another."""
        fd = os.open(os.path.join(self._folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _sync_folder(self) -> None:
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _stamp(path: str) -> tuple[int, int]:
    stat = os.stat(path)
    return stat.st_ino, stat.st_mtime_ns


def _value_cipher(key: _Key, salt: bytes) -> AESGCM:
    return AESGCM(blake3(salt, key=key.data_key).digest())


def _slices(size: int) -> Iterator[tuple[int, int, int]]:
    """(number, start, end); an empty value has one empty slice, so that it has a tag."""
    if not size:
        yield 0, 0, 0
    for start, end in slice_bounds(size):
        yield start // SLICE_BYTES, start, end


def _nonce(number: int) -> bytes:
    return number.to_bytes(NONCE_BYTES, "little")


def _place(record: Record, number: int) -> bytes:
    return record.name + record.scope + _PLACE.pack(record.size, number, slice_count(record.size))


def _owner(tenant: str, key_id: bytes) -> bytes:
    return key_id + tenant.encode()
