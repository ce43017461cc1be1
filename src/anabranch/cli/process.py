"""The processes of a cluster as commands: what `anabranch up` starts, and what another process manager may start."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from anabranch.cluster.live import entry
from anabranch.cluster.live.run_folder import read_spec
from anabranch.cluster.spec import ClusterSpec
from anabranch.core.errors import AnabranchError
from anabranch.core.live.logging import configure
from anabranch.core.live.process import die_with_parent

_SPEC = click.option("--spec", "spec_file", metavar="FILE", required=True, help="The cluster.json of the cluster.")
_ID = click.option("--id", "engine_id", metavar="ID", required=True, help="Which member, e.g. prefill-0.")
_PARENT = click.option("--parent", type=int, metavar="PID", help="End when this parent process ends.")


@contextmanager
def _logged(process: str) -> Iterator[None]:
    """A bug's traceback belongs in the process's log, whatever the command line shows."""
    try:
        yield
    except AnabranchError:
        raise
    except Exception:
        logging.getLogger(__name__).exception("%s failed", process)
        raise


def _begin(spec_file: str, process: str, parent: int | None) -> ClusterSpec:
    if parent is not None:
        die_with_parent(parent)
    # A cluster's files (sockets, arenas, SSD files) are its owner's alone.
    os.umask(0o077)
    spec = read_spec(Path(spec_file))
    configure(spec.log, process)
    return spec


@click.command(
    name="up-directory",
    epilog="Example: `anabranch up-directory --spec cluster.json`, with the file that `anabranch up` writes.",
)
@_SPEC
@_PARENT
def directory(spec_file: str, parent: int | None) -> None:
    """Run the directory: which node holds which block."""
    spec = _begin(spec_file, "directory", parent)
    with _logged("directory"):
        entry.run_directory(spec)


@click.command(name="up-node", epilog="Example: `anabranch up-node --spec cluster.json --id prefill-0`.")
@_SPEC
@_ID
@_PARENT
def node(spec_file: str, engine_id: str, parent: int | None) -> None:
    """Run a node: the arena, the SSD tier and the transfers of one engine."""
    spec = _begin(spec_file, f"{engine_id}-node", parent)
    with _logged("node"):
        entry.run_node(spec, engine_id)


@click.command(epilog="Example: `anabranch engine --spec cluster.json --id prefill-0`.")
@_SPEC
@_ID
@_PARENT
def engine(spec_file: str, engine_id: str, parent: int | None) -> None:
    """Run an engine: the model, for prefill, decode or both."""
    spec = _begin(spec_file, engine_id, parent)
    with _logged("engine"):
        entry.run_engine(spec, engine_id)


@click.command(epilog="Example: `anabranch gateway --spec cluster.json`.")
@_SPEC
@_PARENT
def gateway(spec_file: str, parent: int | None) -> None:
    """Run the gateway: the OpenAI-compatible endpoint."""
    spec = _begin(spec_file, "gateway", parent)
    with _logged("gateway"):
        entry.run_gateway(spec)
