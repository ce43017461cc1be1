from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.core.authentication import TenantRules
from anabranch.core.errors import ConfigError
from anabranch.store.values.config import SecurityConfig
from anabranch.store.values.live.credentials import access_of, credentials_of, new_secret, read_tenants, tls_of


def private(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_new_secret_is_private_and_good(tmp_path: Path) -> None:
    path = tmp_path / "cluster.secret"
    new_secret(str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    config = SecurityConfig(secret_file=str(path))
    access = access_of(config)
    assert access.authenticates
    assert credentials_of(config, "alice").secret == access.cluster_secret == path.read_bytes().strip()
    with pytest.raises(ConfigError, match="exists"):
        new_secret(str(path))
    with pytest.raises(ConfigError, match="No such file"):
        new_secret(str(tmp_path / "none" / "x"))


def test_no_settings_is_open(tmp_path: Path) -> None:
    assert not access_of(SecurityConfig()).authenticates
    assert credentials_of(SecurityConfig()).secret == b""
    assert tls_of(SecurityConfig()) is None
    assert access_of(SecurityConfig(tls_ca="ca.pem")).tls
    with pytest.raises(ConfigError, match="missing: tls_cert"):
        tls_of(SecurityConfig(tls_ca="ca.pem"))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_secrets_that_others_can_read_are_refused(tmp_path: Path, mode: int) -> None:
    for name in ("secret_file", "tenants_file"):
        path = private(tmp_path / name, "x" * 40, mode)
        with pytest.raises(ConfigError, match=rf"security\.{name} .* run `chmod 600"):
            access_of(SecurityConfig(**{name: path}))


def test_short_and_absent_secrets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 5 bytes, a secret has at least 32"):
        access_of(SecurityConfig(secret_file=private(tmp_path / "s", "short\n")))
    with pytest.raises(ConfigError, match=r"security\.secret_file .*No such file"):
        access_of(SecurityConfig(secret_file=str(tmp_path / "none")))


def test_tenants(tmp_path: Path) -> None:
    private(tmp_path / "bob.secret", "b" * 32 + "\n")
    path = private(
        tmp_path / "tenants.toml",
        f'[alice]\nsecret = "{"a" * 32}"\nquota_bytes = "1GiB"\npin_quota_bytes = "1MiB"\nencrypt = true\n'
        '["bob@example"]\nsecret_file = "bob.secret"\n[carol]\nquota_bytes = 7\n',
    )
    assert read_tenants(path) == {
        "alice": TenantRules(secret=b"a" * 32, quota_bytes=1 << 30, pin_quota_bytes=1 << 20, encrypt=True),
        "bob@example": TenantRules(secret=b"b" * 32),
        "carol": TenantRules(quota_bytes=7),
    }
    with pytest.raises(ConfigError, match=r"gives alice a secret and security\.secret_file is empty"):
        access_of(SecurityConfig(tenants_file=path))
    assert access_of(SecurityConfig(tenants_file=path, tls_cert="x")).asks_proof
    twice = private(tmp_path / "cluster", "a" * 32)
    with pytest.raises(ConfigError, match="are equal"):
        access_of(SecurityConfig(tenants_file=path, secret_file=twice))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[alice]\nquota = 1\n", "unknown key 'quota'; did you mean 'quota_bytes'?"),
        ("[alice]\nquota_bytes = -1\n", "must be at least 0"),
        ('[alice]\nencrypt = "perhaps"\n', "expected true or false"),
        ('[alice]\nsecret = "short"\n', "alice.secret in .* is too short"),
        (f'[alice]\nsecret = "{"a" * 32}"\nsecret_file = "x"\n', "both secret and secret_file"),
        ('[alice]\nsecret_file = "absent"\n', "alice.secret_file .*No such file"),
        ("[alice]\nquota_bytes = 1\npin_quota_bytes = 2\n", "exceeds its quota_bytes"),
        ("alice = 1\n", "expected a table"),
        ('[""]\n', "is no tenant's name"),
        ("[alice\n", "not valid TOML"),
    ],
)
def test_a_wrong_tenants_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_tenants(private(tmp_path / "tenants.toml", text))


@pytest.mark.parametrize("secret", ["./alice", "/etc/anabranch/tenants/alice-of-the-search-team.secret", "alice"])
def test_a_path_is_no_secret(tmp_path: Path, secret: str) -> None:
    private(tmp_path / "alice", "a" * 40)
    path = private(tmp_path / "tenants.toml", f'[alice]\nsecret = "{secret}"\n')
    with pytest.raises(ConfigError, match=r"alice\.secret .* secret_file"):
        access_of(SecurityConfig(secret_file=private(tmp_path / "c", "c" * 40), tenants_file=path))
