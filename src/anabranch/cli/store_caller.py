"""What `anabranch store …` and `anabranch top` call with: one session, made from the options of the command line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click
import msgspec

from anabranch.cli.store_settings import CALLER_FLAGS, CALLER_OPTIONS, store_settings, with_options
from anabranch.cluster.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])
_JSON = click.option("--json", "as_json", is_flag=True, help="JSON for programs.")


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The options, resolved."""

    settings: Settings
    nodes: tuple[str, ...]
    tenant: str
    namespace: str
    epoch: str
    timeout_s: float

    @property
    def directory(self) -> str:
        return self.settings.store.directory or os.environ.get("ANABRANCH_DIRECTORY", "")

    @property
    def addresses(self) -> tuple[str, ...]:
        """Nodes to ask beside those that the directory knows; the default node if nothing at all is named."""
        named = self.nodes or tuple(filter(None, [os.environ.get("ANABRANCH_STORE", "")]))
        return named or (() if self.directory else (self.settings.store.listen,))


def with_caller(*, epoch: bool = True) -> Callable[[F], F]:
    """A decorator: the options of a caller, passed on to `caller_of`, and --json."""
    options = [_JSON, *CALLER_OPTIONS]
    if epoch:
        options.insert(0, click.option("--epoch", default="", metavar="NAME", help="Which epoch (model revision)."))
    return with_options(options)


def caller_of(
    nodes: tuple[str, ...],
    tenant: str,
    namespace: str,
    timeout_s: float,
    config_file: str | None,
    sets: tuple[str, ...],
    epoch: str = "",
    **named: object,
) -> Caller:
    settings = store_settings(CALLER_FLAGS, config_file, sets, **named)
    return Caller(settings=settings, nodes=nodes, tenant=tenant, namespace=namespace, epoch=epoch, timeout_s=timeout_s)


@contextmanager
def administrator(caller: Caller) -> Iterator[Any]:
    """An `Administrator` for the options. Raises ConfigError for what they name and is not there."""
    from anabranch.store.values.live.administration import Administrator
    from anabranch.store.values.live.credentials import credentials_of, tls_of
    from anabranch.store.values.live.session import Session

    security = caller.settings.security
    credentials = credentials_of(security, caller.tenant, caller.namespace, caller.epoch)
    session = Session(credentials, tls=tls_of(security), name="anabranch-store")
    found = Administrator(session, caller.directory, caller.addresses, caller.timeout_s)
    try:
        yield found
    finally:
        found.close()
