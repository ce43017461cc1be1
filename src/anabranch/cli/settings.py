"""Settings from the command line: the options every configured command has, and what they resolve to."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from anabranch.cluster.live.capacity import fit
from anabranch.cluster.live.run_folder import default_data_dir
from anabranch.cluster.settings import SECTIONS, contradictions, flag, role_entries, settings_of
from anabranch.cluster.spec import ClusterConfig
from anabranch.core.config import Resolved, refuse
from anabranch.core.live.environment import gather

F = TypeVar("F", bound=Callable[..., Any])
_OPTIONS = [
    click.option(
        "--config", "config_file", metavar="FILE", help="TOML file; without it ./anabranch.toml if it exists."
    ),
    click.option(
        "--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Any setting (see docs/configuration.md)."
    ),
    click.option("--model", metavar="SOURCE", help="default, a model folder, a GGUF file, tripwire or paced."),
    click.option("--name", metavar="NAME", help="Keeps clusters on one host apart.  [default: default]"),
    click.option("--prefill", metavar="N", help="Prefill engines.  [default: 1]"),
    click.option("--decode", metavar="N", help="Decode engines.  [default: 1]"),
    click.option("--role", metavar="ROLE", help="`both`: one colocated engine instead of prefill and decode."),
    click.option("--host", metavar="HOST", help="Address of the endpoint.  [default: 127.0.0.1]"),
    click.option("--port", metavar="PORT", help="Port of the endpoint; 0 = any.  [default: 8000]"),
]
_FLAGS = {
    "model": ("model", "source"),
    "name": ("cluster", "name"),
    "prefill": ("cluster", "prefill"),
    "decode": ("cluster", "decode"),
    "host": ("gateway", "host"),
    "port": ("gateway", "port"),
}


def with_settings(command: F) -> F:
    """Add the settings options to a click command; it passes them on to `effective`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def effective(
    config_file: str | None = None, sets: tuple[str, ...] = (), role: str | None = None, **named: object
) -> Resolved:
    """Defaults < file < environment < flags, fitted to this machine. All problems are in `problems`."""
    entries, role_problems = role_entries(role)
    for name, value in named.items():
        section, key = _FLAGS[name]
        entries += flag(section, key, value, f"--{name}")
    resolved = gather(SECTIONS, file=config_file, variables=os.environ, sets=sets, flags=entries)
    settings = settings_of(resolved)
    impossible = list(contradictions(settings))
    if impossible:
        # A name that makes no path would end the look at the machine.
        return Resolved(resolved.sections, resolved.origins, [*resolved.problems, *role_problems, *impossible])
    ssd_dir = settings.node.ssd_dir or str(default_data_dir(settings.cluster) / "clusters" / settings.cluster.name)
    resolved, misfits = fit(resolved, settings, ssd_dir)
    problems = [*resolved.problems, *role_problems, *misfits]
    return Resolved(resolved.sections, resolved.origins, problems)


def located(config_file: str | None, name: str | None) -> ClusterConfig:
    """The [cluster] section alone, for commands that talk to a running cluster. Raises ConfigError."""
    resolved = gather(SECTIONS, file=config_file, variables=os.environ, flags=flag("cluster", "name", name, "--name"))
    refuse(resolved.problems)
    return settings_of(resolved).cluster
