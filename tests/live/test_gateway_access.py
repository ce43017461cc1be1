"""Keys, tenants, secrets, ports, and the gateway as a process."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest

from anabranch.blocks.hashing import prefix_keys, tenant_hash_key
from anabranch.core.errors import ConfigError, RequestError
from anabranch.engine.messages import Submit
from anabranch.serving.config import GatewayConfig
from anabranch.serving.live.access import SECRET_FILE, Tenants, load_keys, load_secret
from anabranch.serving.live.server import listen
from anabranch.testing.fake_engine import FakeEngine
from anabranch.testing.live.gateway import SECRET, running_gateway

KEYS = {"key-of-ada": "ada", "key-of-bob": "bob", "second-of-ada": "ada"}


def test_tenants_are_told_apart_and_share_no_block() -> None:
    with FakeEngine("b") as engine, running_gateway([engine], keys=KEYS) as running:
        cached = {}
        for key in ("key-of-ada", "key-of-bob", "second-of-ada"):
            with openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0) as client:
                answer = client.completions.create(model="tripwire", prompt="a shared prompt " * 20, max_tokens=2)
                cached[key] = answer.usage.prompt_tokens_details.cached_tokens
        ada, bob, ada_again = (message.request for message in engine.requests(Submit))
    assert (ada.tenant, bob.tenant, ada_again.tenant) == ("ada", "bob", "ada")
    assert ada.hash_key == ada_again.hash_key == tenant_hash_key(SECRET, "ada")
    assert ada.root == bob.root
    names = [set(prefix_keys(r.root, r.hash_key, 16, r.tokens)) for r in (ada, bob)]
    assert not names[0] & names[1]
    assert cached["key-of-ada"] == cached["key-of-bob"] == 0
    assert cached["second-of-ada"] > 0


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer wrong", "Basic key-of-ada", "key-of-ada"])
def test_without_a_valid_key_everything_but_health_is_401(header: str | None) -> None:
    with FakeEngine("b") as engine, running_gateway([engine], keys=KEYS) as running:
        headers = {"authorization": header} if header is not None else {}
        for method, path in (
            ("GET", "/v1/models"),
            ("POST", "/v1/completions"),
            ("POST", "/v1/chat/completions"),
            ("POST", "/tokenize"),
        ):
            refused = httpx.request(method, f"{running.url}{path}", headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert refused.json()["error"]["type"] == "authentication_error"
        assert httpx.get(f"{running.url}/health", headers=headers).status_code == 200
        assert not engine.requests(Submit)


def test_the_official_client_understands_a_wrong_key() -> None:
    with (
        FakeEngine("b") as engine,
        running_gateway([engine], keys=KEYS) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_keys_outside_ascii() -> None:
    tenants = Tenants({"schlüssel": "t"}, SECRET)
    assert tenants.authenticate("Bearer schlüssel".encode().decode("latin-1")) == "t"
    with pytest.raises(RequestError):
        tenants.authenticate("Bearer \udcff")


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.1", "::", "example.org"])
def test_a_reachable_address_needs_keys(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="api_keys_file"):
        load_keys(GatewayConfig(host=host))
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(KEYS))
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_keys(GatewayConfig(host=host, api_keys_file=str(path)))
    path.chmod(0o600)
    assert load_keys(GatewayConfig(host=host, api_keys_file=str(path))) == KEYS


@pytest.mark.parametrize(("host", "open_house"), [("0.0.0.0", False), ("127.0.0.1", True)])
def test_strangers_see_the_status_and_nothing_else(host: str, open_house: bool) -> None:
    """Keyed: processes and figures are shown to everybody on loopback, else to those who have a key."""
    config = GatewayConfig(host=host, port=0)  # what it was told to bind; the test itself listens on loopback
    with FakeEngine("b") as engine, running_gateway([engine], keys=KEYS, config=config) as running:
        for headers in ({}, {"Authorization": f"Bearer {next(iter(KEYS))}"}):
            told = open_house or bool(headers)
            ready = httpx.get(f"{running.url}/health/ready", headers=headers)
            assert ready.status_code == 200
            assert ("engines" in ready.json()) == told
            assert httpx.get(f"{running.url}/metrics", headers=headers).status_code == (200 if told else 401)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    assert load_keys(GatewayConfig(host=host)) == {}


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"a": 3}', '{"a": ""}', '{"": "t"}'])
def test_a_bad_keys_file_is_named(content: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"keys\.json"):
        load_keys(GatewayConfig(api_keys_file=str(path)))
    with pytest.raises(ConfigError, match=r"nothing\.json"):
        load_keys(GatewayConfig(api_keys_file=str(tmp_path / "nothing.json")))


def test_the_secret_is_made_once_and_private(tmp_path: Path) -> None:
    secret = load_secret(tmp_path / "data")
    path = tmp_path / "data" / SECRET_FILE
    assert len(secret) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_secret(tmp_path / "data") == secret
    assert [entry.name for entry in path.parent.iterdir()] == [SECRET_FILE]
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_secret(tmp_path / "data")
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="32 bytes"):
        load_secret(tmp_path / "data")


def test_a_busy_port_is_a_clear_error() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"gateway\.port = {port}: cannot listen"):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"gateway\.host"):
        listen("no such host", 0)


MAIN = """
import sys
from pathlib import Path
from anabranch.engine.tripwire import tripwire_info
from anabranch.serving.config import GatewayConfig
from anabranch.serving.live.server import run_gateway
run_gateway(
    GatewayConfig(port=0), tripwire_info(), engines=[sys.argv[1]], secret_dir=Path(sys.argv[2]), served_name="served",
    on_ready=lambda url: print(url, flush=True),
)
assert "torch" not in sys.modules
print("clean")
"""


def test_the_process_serves_and_ends_on_sigterm(tmp_path: Path) -> None:
    with FakeEngine("b", address=f"unix:{tmp_path}/e") as engine:
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN, engine.address, str(tmp_path / "data")], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            with openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
                answer = client.completions.create(model="served", prompt="hello", max_tokens=5)
            assert len(answer.choices[0].text) == 5
            process.send_signal(signal.SIGTERM)
            assert process.stdout.read().strip() == "clean"
            assert process.wait(20) == 0
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    assert os.path.exists(tmp_path / "data" / SECRET_FILE)
    with pytest.raises(OSError), socket.create_connection((url.split("/")[2].split(":")[0], int(url.split(":")[2]))):
        pass
