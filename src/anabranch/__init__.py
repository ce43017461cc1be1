"""KV cache as distributed state for LLM serving.

`Client` and `AsyncClient` (with what they return: `Outcome`, `Got`, `Views`) are the value store for a program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anabranch.store.values.got import Got
    from anabranch.store.values.live.async_client import AsyncClient
    from anabranch.store.values.live.client import Client
    from anabranch.store.values.live.views import Views
    from anabranch.store.values.outcome import Outcome

__all__ = ["AsyncClient", "Client", "Got", "Outcome", "Views"]
__version__ = "0.1.0"
_HOMES = {
    "AsyncClient": "anabranch.store.values.live.async_client",
    "Client": "anabranch.store.values.live.client",
    "Got": "anabranch.store.values.got",
    "Outcome": "anabranch.store.values.outcome",
    "Views": "anabranch.store.values.live.views",
}


def __getattr__(name: str) -> Any:
    """Loaded at first use: `import anabranch` costs nothing, and a command that needs no client loads none."""
    if name not in _HOMES:
        raise AttributeError(f"module 'anabranch' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
