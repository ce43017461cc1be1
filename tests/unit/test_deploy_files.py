"""What deploy/ names exists: commands, flags, settings, ports. YAML parses; files belong together."""

from __future__ import annotations

import configparser
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from anabranch.cli.main import COMMANDS, load
from anabranch.cluster.settings import SECTIONS, settings_of, store_contradictions
from anabranch.core.live.environment import gather

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def accepts(arguments: list[str]) -> dict[str, Any]:
    """Parse a command line of `anabranch` as the command itself does. Raises what click does for the unknown."""
    command = load(COMMANDS[arguments[0]])
    rest = arguments[1:]
    while isinstance(command, click.Group):
        command, rest = command.commands[rest[0]], rest[1:]
    with command.make_context("anabranch", rest) as context:
        return dict(context.params)


def documents(path: Path) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def containers() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for path in MANIFESTS:
        for document in documents(path):
            pod = document.get("spec", {}).get("template", {}).get("spec", {}) if isinstance(document, dict) else {}
            for container in [*pod.get("initContainers", []), *pod.get("containers", [])]:
                yield path.name, container, pod


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_start_what_exists(path: Path) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(path)
    words = shlex.split(unit["Service"]["ExecStart"])
    assert words[0].endswith("/bin/anabranch")
    named = accepts(words[1:])
    assert named["config_file"] == "/etc/anabranch/anabranch.toml"
    assert unit["Service"]["Type"] == "notify"
    if "data_dir" in named:
        state = unit["Service"]["StateDirectory"]
        assert named["data_dir"] == f"/var/lib/{state}"
        assert "/dev/shm" in unit["Service"]["ReadWritePaths"]


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.toml")), ids=lambda path: str(path.relative_to(DEPLOY)))
def test_configurations_are_valid(path: Path) -> None:
    resolved = gather(SECTIONS, file=str(path), variables={})
    settings = settings_of(resolved)
    assert resolved.problems == []
    assert [problem for problem in store_contradictions(settings) if "advertise" not in problem] == []
    assert settings.security.secret_file


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_parse(path: Path) -> None:
    for document in documents(path):
        assert document["apiVersion"]
        assert document["kind"]
        assert document["kind"] == "Kustomization" or document["metadata"]["name"]


def test_the_kustomization_names_every_manifest() -> None:
    (kustomization,) = documents(DEPLOY / "kubernetes" / "kustomization.yaml")
    assert set(kustomization["resources"]) == {path.name for path in MANIFESTS} - {"kustomization.yaml"}
    for generator in kustomization["configMapGenerator"]:
        assert all((DEPLOY / "kubernetes" / name).exists() for name in generator["files"])


def test_containers_run_what_exists_and_mount_what_there_is() -> None:
    ours = 0
    for name, container, pod in containers():
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
        assert mounted <= volumes | {"data"}, f"{name} {container['name']}"
        ports = {port["name"] for port in container.get("ports", [])}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if probe in container:
                assert container[probe]["httpGet"]["port"] in ports
        if container.get("command") == ["anabranch"]:
            ours += 1
            named = accepts([re.sub(r"\$\([A-Z_]+\)", "value", argument) for argument in container["args"]])
            mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert any(named["config_file"].startswith(mount) for mount in mounts)
            variables = {entry["name"] for entry in container["env"]}
            used = {word for argument in container["args"] for word in re.findall(r"\$\(([A-Z_]+)\)", argument)}
            assert used <= variables
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert ours == 2


def test_commands_in_the_text_exist() -> None:
    text = (DEPLOY / "README.md").read_text()
    lines = re.findall(r"`(anabranch [^`]+)`", text)
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        lines += [line for line in block.splitlines() if line.startswith("anabranch ")]
    assert len(lines) >= 6
    for line in lines:
        accepts(shlex.split(line)[1:])
    for path in re.findall(r"deploy/[\w./-]*\w", text):
        assert (DEPLOY.parent / path).exists(), path


def test_text_and_policies_agree_on_ports() -> None:
    text = (DEPLOY / "README.md").read_text()
    for document in documents(DEPLOY / "kubernetes" / "network.yaml"):
        for rule in document["spec"]["ingress"]:
            assert all(str(port["port"]) in text or port["port"] == 2380 for port in rule["ports"])
