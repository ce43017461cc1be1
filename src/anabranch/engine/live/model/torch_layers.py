"""The forward pass in plain torch: what runs where `native_layers` cannot, and what it is tested against.

Weights are unpacked into private row-major copies at construction.
"""

from __future__ import annotations

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812

from anabranch.engine.live.model.rope import tables
from anabranch.engine.live.model.step import Step
from anabranch.engine.live.model.weight_file import TensorFile, unpack, unpack_pair
from anabranch.engine.live.model_files import ModelShape
from anabranch.engine.runner import LayerGate

Tensor = torch.Tensor


class _Layer(msgspec.Struct, frozen=True):
    attn_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class _Row(msgspec.Struct, frozen=True):
    """One chunk of a step: rows `first` … `last`-1 at positions `start`…, K/V in `pages`."""

    first: int
    last: int
    start: int
    pages: Tensor


class TorchLayers:
    """`pages`: [slots, layers, 2, block_tokens, kv_heads, head_dim] in the K/V dtype; read and written in place."""

    def __init__(self, shape: ModelShape, weights: TensorFile, pages: Tensor) -> None:
        self._shape, self._pages = shape, pages
        self._embed = torch.from_numpy(unpack(weights.float32("embed"), shape.vocab))
        self._head = self._embed if shape.tied else torch.from_numpy(unpack(weights.float32("lm_head"), shape.vocab))
        self._norm = torch.from_numpy(weights.float32("norm"))
        self._layers = [_load_layer(shape, weights, layer) for layer in range(shape.layers)]
        cos, sin = tables(weights.float32("inv_freq"), shape.context_tokens)
        self._cos, self._sin = torch.from_numpy(cos), torch.from_numpy(sin)

    def forward(self, step: Step, gate: LayerGate) -> Tensor:
        """See `step.Layers`."""
        x = self._embed[torch.from_numpy(step.tokens).long()]
        positions = torch.from_numpy(step.positions).long()
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        where = (torch.from_numpy(step.slots).long(), torch.from_numpy(step.offsets).long())
        rows = _rows(step)
        for index, layer in enumerate(self._layers):
            q, k, v = self._project(layer, x, cos, sin)
            cache = self._pages[:, index]
            cache[:, 0].index_put_(where, k.to(cache.dtype))
            cache[:, 1].index_put_(where, v.to(cache.dtype))
            gate.wait(index)
            gate.done(index)
            x = x + F.linear(self._attend(q, cache, rows), layer.o)
            h = F.rms_norm(x, (x.shape[-1],), layer.mlp_norm, self._shape.norm_eps)
            x = x + F.linear(F.silu(F.linear(h, layer.gate)) * F.linear(h, layer.up), layer.down)
        x = x[torch.from_numpy(step.sampled).long()]
        return F.linear(F.rms_norm(x, (x.shape[-1],), self._norm, self._shape.norm_eps), self._head)

    def close(self) -> None:
        """See `step.Layers`."""
        del self._pages

    def _project(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of [rows, heads, head_dim], normalized and rotated."""
        shape = self._shape
        h = F.rms_norm(x, (x.shape[-1],), layer.attn_norm, shape.norm_eps)
        qkv = F.linear(h, layer.qkv, layer.qkv_bias)
        q, k, v = torch.split(qkv, [shape.q_size, shape.kv_size, shape.kv_size], dim=-1)
        q = q.view(-1, shape.heads, shape.head_dim)
        k = k.view(-1, shape.kv_heads, shape.head_dim)
        if layer.q_norm is not None:
            q = F.rms_norm(q, (shape.head_dim,), layer.q_norm, shape.norm_eps)
        if layer.k_norm is not None:
            k = F.rms_norm(k, (shape.head_dim,), layer.k_norm, shape.norm_eps)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v.view(-1, shape.kv_heads, shape.head_dim)

    def _attend(self, q: Tensor, cache: Tensor, rows: list[_Row]) -> Tensor:
        """Causal attention of each chunk over its own pages: [rows, heads · head_dim]."""
        out = torch.empty(len(q), self._shape.q_size)
        for row in rows:
            count, context = row.last - row.first, row.start + row.last - row.first
            kv = cache[row.pages].float()
            k, v = (kv[:, part].flatten(0, 1)[:context].transpose(0, 1) for part in (0, 1))
            mask = None
            if count > 1:
                mask = torch.ones(count, context, dtype=torch.bool).tril(row.start)
            query = q[row.first : row.last].transpose(0, 1)
            answer = F.scaled_dot_product_attention(query[None], k[None], v[None], attn_mask=mask, enable_gqa=True)[0]
            out[row.first : row.last] = answer.transpose(0, 1).reshape(count, -1)
        return out


def _rows(step: Step) -> list[_Row]:
    block_tables = torch.from_numpy(step.pages).long()
    first, table = step.first.tolist(), step.table.tolist()
    return [
        _Row(first[c], first[c + 1], start, block_tables[table[c] : table[c + 1]])
        for c, start in enumerate(step.start.tolist())
    ]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def _load_layer(shape: ModelShape, weights: TensorFile, layer: int) -> _Layer:
    def plain(name: str) -> Tensor | None:
        key = f"layers.{layer}.{name}"
        return torch.from_numpy(weights.float32(key)) if key in weights else None

    def matrix(name: str, out: int) -> Tensor:
        return torch.from_numpy(unpack(weights.float32(f"layers.{layer}.{name}"), out))

    gate, up = unpack_pair(weights.float32(f"layers.{layer}.gate_up"))
    return _Layer(
        attn_norm=torch.from_numpy(weights.float32(f"layers.{layer}.attn_norm")),
        qkv=matrix("qkv", shape.q_size + 2 * shape.kv_size),
        qkv_bias=plain("qkv_bias"),
        q_norm=plain("q_norm"),
        k_norm=plain("k_norm"),
        o=matrix("o", shape.hidden),
        mlp_norm=torch.from_numpy(weights.float32(f"layers.{layer}.mlp_norm")),
        gate=torch.from_numpy(gate),
        up=torch.from_numpy(up),
        down=matrix("down", shape.hidden),
    )
