"""Settings of the store's commands: what its processes run with, and how its callers reach and prove themselves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click

from anabranch.cluster.settings import SECTIONS, Settings, flag, settings_of, store_contradictions
from anabranch.core.config import refuse
from anabranch.core.live.environment import gather
from anabranch.store.values.config import StoreConfig

F = TypeVar("F", bound=Callable[..., Any])
Flags = dict[str, tuple[str, str]]
"""Name of a flag → the (section, key) that it sets."""

CONFIG_OPTIONS = [
    click.option(
        "--config", "config_file", metavar="FILE", help="TOML file; without it ./anabranch.toml if it exists."
    ),
    click.option(
        "--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Any setting (see docs/configuration.md)."
    ),
]
SECURITY_OPTIONS = [
    click.option("--secret-file", metavar="FILE", help="Secret to prove; `anabranch store secret new FILE` makes one."),
    click.option("--tls-cert", metavar="FILE", help="Certificate, PEM."),
    click.option("--tls-key", metavar="FILE", help="Its key, PEM, mode 0600."),
    click.option("--tls-ca", metavar="FILE", help="Authority of the other side's certificate, PEM."),
]
SECURITY_FLAGS: Flags = {
    "secret_file": ("security", "secret_file"),
    "tls_cert": ("security", "tls_cert"),
    "tls_key": ("security", "tls_key"),
    "tls_ca": ("security", "tls_ca"),
}
STORE_SECTIONS = ("store", "write", "link", "security", "directory", "log", "trace")
"""Those that the store's own commands heed."""
SERVER_OPTIONS = [
    click.option(
        "--metrics", default="", metavar="HOST:PORT", help="Serve /metrics and /healthz here, to whoever asks."
    ),
    *SECURITY_OPTIONS,
    click.option("--tenants-file", metavar="FILE", help="Tenants: TOML with secret, quota_bytes, encrypt for each."),
    *CONFIG_OPTIONS,
]
SERVER_FLAGS: Flags = {"tenants_file": ("security", "tenants_file"), **SECURITY_FLAGS}
CALLER_OPTIONS = [
    click.option("--directory", metavar="ADDRESS", help="Directory: host:port, shards comma-separated, or etcd://…"),
    click.option("--node", "nodes", multiple=True, metavar="ADDRESS", help="Ask this node (may be repeated)."),
    click.option("--tenant", default="default", show_default=True, metavar="NAME", help="Whose values."),
    click.option("--namespace", default="default", show_default=True, metavar="NAME", help="Which of its namespaces."),
    click.option("--timeout", "timeout_s", default=5.0, show_default=True, metavar="SECONDS", help="Of each answer."),
    *SECURITY_OPTIONS,
    *CONFIG_OPTIONS,
]
CALLER_FLAGS: Flags = {"directory": ("store", "directory"), **SECURITY_FLAGS}


def with_options(options: list[Callable[[F], F]]) -> Callable[[F], F]:
    """A decorator that adds all of them, in order."""

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def store_settings(
    flags: Flags, config_file: str | None = None, sets: tuple[str, ...] = (), **named: object
) -> Settings:
    """Defaults < file < environment < flags. Raises ConfigError with every problem."""
    entries = []
    for name, value in named.items():
        section, key = flags[name]
        entries += flag(section, key, value, f"--{name.replace('_', '-')}")
    resolved = gather(SECTIONS, file=config_file, variables=os.environ, sets=sets, flags=entries)
    settings = settings_of(resolved)
    refuse([*resolved.problems, *_without_effect(sets), *store_contradictions(settings)])
    return settings


def _without_effect(sets: tuple[str, ...]) -> Iterator[str]:
    """Of the command line only: a file and an environment may serve `anabranch up` as well."""
    for name in (one.partition("=")[0].strip() for one in sets):
        section, _, key = name.partition(".")
        if section in SECTIONS and section not in STORE_SECTIONS:
            remedy = f"; say store.{key}" if key in StoreConfig.__struct_fields__ else ""
            yield f"--set {name}: section {section} is of `anabranch up` and has no effect here{remedy}"
