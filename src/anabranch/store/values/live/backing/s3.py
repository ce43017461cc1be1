"""Objects in an S3-compatible store, through `obstore`."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from anabranch.core.errors import ConfigError, MissingExtra
from anabranch.store.values.live.backing.objects import Listed
from anabranch.store.values.packs import object_number

Options = Mapping[str, str]
GAP_BYTES = 256 << 10
DELETE_BATCH = 1000


class S3Objects:
    """Writes are conditional (If-None-Match: *): two writers never share a name. A request that fails for no lasting
    reason is tried again for up to `RETRY`. Raises ConfigError for a URL or an option that cannot be used."""

    RETRY = timedelta(seconds=20)

    def __init__(self, url: str, options: Options) -> None:
        try:
            import obstore
            from obstore import exceptions
            from obstore.store import S3Store
        except ModuleNotFoundError as error:
            raise MissingExtra("s3", "obstore") from error
        bucket, _, prefix = url.removeprefix("s3://").rstrip("/").partition("/")
        if not url.startswith("s3://") or not bucket:
            raise ConfigError(f"backing = {url!r} is not s3://bucket or s3://bucket/prefix")
        endpoint = str(options.get("aws_endpoint", options.get("endpoint", "")))
        client: Any = {"allow_http": endpoint.startswith("http://"), "timeout": timedelta(seconds=60)}
        config: Any = dict(options)
        try:
            self._store = S3Store(
                bucket,
                prefix=prefix or None,
                config=config,
                client_options=client,
                retry_config={"max_retries": 5, "retry_timeout": self.RETRY},
            )
        except (exceptions.BaseError, TypeError, ValueError) as error:
            raise ConfigError(f"backing = {url!r} with options {sorted(options)}: {_first_line(error)}") from error
        self._api = obstore
        self._errors = exceptions

    def put(self, name: str, parts: Sequence[memoryview]) -> None:
        with self._as_os_errors():
            self._api.put(self._store, name, iter(parts), mode="create", use_multipart=False)

    def get(self, name: str) -> bytes:
        with self._as_os_errors():
            return bytes(self._api.get(self._store, name).bytes())

    def read(self, name: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        wanted = [(offset, view) for offset, view in pieces if view.nbytes]
        if not wanted:
            return
        with self._as_os_errors():
            ranges = self._api.get_ranges(
                self._store,
                name,
                starts=[offset for offset, _ in wanted],
                ends=[offset + view.nbytes for offset, view in wanted],
                coalesce=GAP_BYTES,
            )
        for (_, view), data in zip(wanted, ranges, strict=True):
            got = memoryview(data)
            view[: got.nbytes] = got.cast("B")

    def list(self, prefix: str) -> list[Listed]:
        now = datetime.now(UTC)
        found: list[Listed] = []
        with self._as_os_errors():
            for chunk in self._api.list(self._store, prefix, chunk_size=1000):
                found += [
                    Listed(item["path"], (now - item["last_modified"]).total_seconds())
                    for item in chunk
                    if object_number(item["path"]) is not None
                ]
        return found

    def delete(self, names: Sequence[str]) -> None:
        for at in range(0, len(names), DELETE_BATCH):
            with self._as_os_errors(missing_is_fine=True):
                self._api.delete(self._store, list(names[at : at + DELETE_BATCH]))

    def close(self) -> None:
        """Connections go with the object."""

    @contextmanager
    def _as_os_errors(self, *, missing_is_fine: bool = False) -> Iterator[None]:
        errors = self._errors
        try:
            yield
        except (errors.NotFoundError, FileNotFoundError) as error:
            if not missing_is_fine:
                raise FileNotFoundError(errno.ENOENT, _first_line(error)) from error
        except (errors.AlreadyExistsError, errors.PreconditionError) as error:
            raise FileExistsError(errno.EEXIST, _first_line(error)) from error
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
            raise PermissionError(errno.EACCES, _first_line(error)) from error
        except errors.BaseError as error:
            raise OSError(errno.EIO, _first_line(error)) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
