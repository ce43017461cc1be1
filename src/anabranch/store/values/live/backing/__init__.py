"""The tier that all nodes share. `open_backing` takes what the setting `backing` says."""

from __future__ import annotations

from anabranch.core.errors import ConfigError
from anabranch.core.faults import NO_FAULTS, Faults
from anabranch.store.values.contracts import Cipher
from anabranch.store.values.live.backing.folder import FolderObjects
from anabranch.store.values.live.backing.packed import PackedBacking
from anabranch.store.values.live.backing.s3 import Options, S3Objects

REFRESH_S = 10.0


class FolderBacking(PackedBacking):
    """`PackedBacking` in a folder of any file system, shared or not."""

    def __init__(
        self, path: str, *, cipher: Cipher | None = None, faults: Faults = NO_FAULTS, refresh_s: float | None = None
    ) -> None:
        super().__init__(FolderObjects(path), cipher=cipher, faults=faults, refresh_s=refresh_s)


class ObjectBacking(PackedBacking):
    """`PackedBacking` in a bucket: `s3://bucket/prefix`. What `options` (`aws_endpoint`, `aws_region`,
    `aws_access_key_id`, …) leaves open comes from the usual AWS_* variables. Raises MissingExtra without obstore."""

    def __init__(
        self,
        url: str,
        options: Options | None = None,
        *,
        cipher: Cipher | None = None,
        faults: Faults = NO_FAULTS,
        refresh_s: float | None = None,
    ) -> None:
        super().__init__(S3Objects(url, options or {}), cipher=cipher, faults=faults, refresh_s=refresh_s)


def open_backing(
    url: str,
    *,
    options: Options | None = None,
    cipher: Cipher | None = None,
    faults: Faults = NO_FAULTS,
    refresh_s: float | None = REFRESH_S,
) -> PackedBacking | None:
    """A folder's path or `file:///path`, or `s3://bucket/prefix`; "": there is none. It learns of other nodes' packs
    every `refresh_s` (None: only when `refresh` is called) and keeps the store tidy. Raises ConfigError, MissingExtra,
    Unavailable (it cannot be reached)."""
    scheme, separator, rest = url.partition("://")
    if not url:
        return None
    if not separator:
        return FolderBacking(url, cipher=cipher, faults=faults, refresh_s=refresh_s)
    if scheme == "file" and rest.startswith("/"):
        return FolderBacking(rest, cipher=cipher, faults=faults, refresh_s=refresh_s)
    if scheme == "s3":
        return ObjectBacking(url, options, cipher=cipher, faults=faults, refresh_s=refresh_s)
    raise ConfigError(f"backing = {url!r} is neither a folder nor s3://bucket/prefix")


__all__ = ["FolderBacking", "ObjectBacking", "PackedBacking", "open_backing"]
