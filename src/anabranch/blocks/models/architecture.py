"""What each layer of a model keeps for a sequence.

**Covers** the description: K/V that grows with the context, K/V of a sliding window, constant state, or nothing.
**Does not cover** reading it from a file (`config_json`, `gguf_metadata`) or adding it up (`sizing`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from anabranch.core.errors import ModelFileError

Attention = Literal["MHA", "GQA", "MQA", "MLA", "none"]


class LayerKeeps(msgspec.Struct, frozen=True, kw_only=True):
    """One layer. `heads` K/V heads of `head_elements` elements each (K and V together) per token, 0 for a layer without
    K/V of its own. `window`: only that many last tokens are ever read again; 0 = all.
    `state_elements`: constant per sequence; `recurrent_elements` of them may have a dtype of their own.
    `replicated`: every tensor-parallel rank holds it whole (an MLA latent)."""

    heads: int = 0
    head_elements: int = 0
    window: int = 0
    state_elements: int = 0
    recurrent_elements: int = 0
    replicated: bool = False

    def elements_per_token(self, tp: int = 1) -> int:
        """On one of `tp` ranks. Fewer heads than ranks: heads are replicated, each rank holds one."""
        heads = self.heads if self.replicated else -(-self.heads // tp)
        return heads * self.head_elements


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """`dtype`: what the file says the weights are, "" if it says nothing. `context_tokens`: 0 if it does not say.
    `state_dtype`: dtype of recurrent state where the file names one. `notes`: what is not counted, for people."""

    name: str
    attention: Attention
    layers: tuple[LayerKeeps, ...]
    context_tokens: int = 0
    dtype: str = ""
    state_dtype: str = ""
    notes: tuple[str, ...] = ()

    @property
    def kv_layers(self) -> int:
        return sum(1 for layer in self.layers if layer.heads)

    @property
    def window_layers(self) -> int:
        return sum(1 for layer in self.layers if layer.heads and layer.window)

    @property
    def state_layers(self) -> int:
        return sum(1 for layer in self.layers if layer.state_elements)


def attention_name(heads: int, kv_heads: int) -> Attention:
    """MHA, GQA or MQA from the two counts."""
    if kv_heads >= heads:
        return "MHA"
    return "MQA" if kv_heads == 1 else "GQA"


class Fields:
    """Typed look-ups in a parsed configuration. Every error names the file and the fields that were looked for."""

    def __init__(self, values: dict[str, object], where: str) -> None:
        self.values = values
        self.where = where

    def raw(self, *names: str) -> object | None:
        """The first of `names` that is present and not null."""
        for name in names:
            value = self.values.get(name)
            if value is not None:
                return value
        return None

    def number(self, *names: str) -> int | None:
        """A non-negative integer, None if absent. Raises ModelFileError on anything else."""
        for name in names:
            value = self.values.get(name)
            if value is None or isinstance(value, list | dict):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ModelFileError(f"{self.where}: {name} must be a whole number, got {value!r}")
            return value
        return None

    def needed(self, meaning: str, *names: str) -> int:
        """A positive integer. Raises ModelFileError naming what was looked for."""
        value = self.number(*names)
        if not value:
            raise ModelFileError(f"{self.where}: cannot tell {meaning}; looked for {', '.join(names)}")
        return value

    def numbers(self, name: str) -> list[int] | None:
        value = self.values.get(name)
        if not isinstance(value, list):
            return None
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            raise ModelFileError(f"{self.where}: {name} must be a list of whole numbers")
        return list(value)

    def words(self, *names: str) -> list[str] | None:
        value = self.raw(*names)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            return None
        return list(value)

    def text(self, *names: str) -> str:
        value = self.raw(*names)
        return value if isinstance(value, str) else ""

    def table(self, *names: str) -> Fields | None:
        value = self.raw(*names)
        return Fields(value, self.where) if isinstance(value, dict) else None
