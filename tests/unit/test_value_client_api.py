"""The public face of the store for a program: few calls, the same twice, and loaded only when used."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import anabranch
from anabranch.store.values.contracts import StoreClient


def calls(kind: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(member)
        for name, member in vars(kind).items()
        if callable(member) and not name.startswith("_")
    }


def test_at_most_fifteen_calls_and_the_same_for_asyncio() -> None:
    assert calls(anabranch.Client) == calls(anabranch.AsyncClient)
    assert len(calls(anabranch.Client)) == 15
    assert all(inspect.iscoroutinefunction(getattr(anabranch.AsyncClient, name)) for name in calls(anabranch.Client))


def test_both_take_the_same_settings() -> None:
    settings = [dict(inspect.signature(kind).parameters) for kind in (anabranch.Client, anabranch.AsyncClient)]
    assert settings[1].pop("calls").default == 8
    assert settings[0] == settings[1]


def test_the_client_keeps_what_connectors_are_promised() -> None:
    promised = calls(StoreClient)
    assert {name: calls(anabranch.Client)[name] for name in promised} == promised


def test_importing_the_package_loads_none_of_it() -> None:
    code = "import sys, anabranch; sys.exit(any('store' in name or 'socket' == name for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    code = (
        "import sys, anabranch; anabranch.Client; anabranch.AsyncClient;"
        "sys.exit(bool({'numpy', 'torch', 'etcd3', 'obstore', 'cryptography'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_names_are_those_that_are_listed() -> None:
    assert all(getattr(anabranch, name).__name__ == name for name in anabranch.__all__)
    assert set(anabranch.__all__) <= set(dir(anabranch))
    with pytest.raises(AttributeError, match="nothing"):
        anabranch.nothing  # noqa: B018
