"""The forward pass in compiled kernels (`kernels.c`), reading packed weights straight from the mapped file.

**Promise**: bit-identical results for a token whatever else is in the step, however its prompt was cut into chunks.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch

from anabranch.core.errors import InvariantBroken
from anabranch.engine.live.model.rope import tables
from anabranch.engine.live.model.step import Step
from anabranch.engine.live.model.weight_file import PANEL, Array, TensorFile
from anabranch.engine.live.model_files import ModelShape
from anabranch.engine.runner import LayerGate

PACKAGE, SOURCES = "anabranch.engine.live.model", ("kernels.c", "pool.h")
MAX_HEAD, MAX_GROUP = 256, 96
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_I, _F, _P = ctypes.c_int32, ctypes.c_float, ctypes.c_void_p


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, _I) for name in ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")),
        *((name, _I) for name in ("layers", "block_tokens", "kv_dtype")),
        *((name, _F) for name in ("norm_eps", "scale")),
        *((name, _P) for name in ("pool", "pages", "embed", "head", "norm", "cos", "sin")),
    ]


class _Layer(ctypes.Structure):
    names = ("attn_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "o", "mlp_norm", "gate_up", "down")
    _fields_ = [(name, _P) for name in names]


class _Step(ctypes.Structure):
    ints = ("tokens", "positions", "slots", "offsets", "first", "start", "table", "pages", "sampled")
    floats = ("x", "h", "qkv", "attended", "mlp", "logits")
    _fields_ = [
        *((name, _I) for name in ("rows", "chunks", "wanted_count", "qkv_width")),
        *((name, _P) for name in ints),
        *((name, _P) for name in floats),
    ]


def refusal(shape: ModelShape) -> str:
    """ "" if the kernels can run this shape, else why not."""
    if shape.hidden % PANEL or shape.head_dim % PANEL or shape.head_dim > MAX_HEAD:
        return f"hidden size {shape.hidden} or head size {shape.head_dim} is not a multiple of {PANEL}"
    if shape.heads // shape.kv_heads > MAX_GROUP:
        return f"{shape.heads // shape.kv_heads} query heads share a K/V head, more than {MAX_GROUP}"
    return ""


class NativeLayers:
    """`pages`: [slots, layers, 2, block_tokens, kv_heads, head_dim] in the K/V dtype; read and written in place."""

    def __init__(
        self, kernels: ctypes.CDLL, shape: ModelShape, weights: TensorFile, pages: torch.Tensor, threads: int
    ) -> None:
        self._kernels, self._shape = kernels, shape
        self._cos, self._sin = tables(weights.float32("inv_freq"), shape.context_tokens)
        self._kept: list[Any] = [weights, pages]
        kernels.pool_open.restype = ctypes.c_void_p
        kernels.pool_close.argtypes = [ctypes.c_void_p]
        self._pool = kernels.pool_open(threads)
        if not self._pool:
            raise InvariantBroken("the kernels could not allocate their scratch memory")
        self._model = self._describe(weights, pages)
        self._layers = [self._layer(weights, index) for index in range(shape.layers)]
        self._width = shape.q_size + 2 * shape.kv_size
        self._buffers: dict[str, torch.Tensor] = {}

    def forward(self, step: Step, gate: LayerGate) -> torch.Tensor:
        """See `step.Layers`."""
        call, model = self._kernels, ctypes.byref(self._model)
        described = self._step(step)
        at = ctypes.byref(described)
        call.embed_rows(model, at)
        for index, layer in enumerate(self._layers):
            where = ctypes.byref(layer)
            call.project(model, where, at, index)
            gate.wait(index)
            gate.done(index)
            if call.attend(model, where, at, index):
                raise InvariantBroken("attention ran out of memory; lower step_tokens")
        if len(step.sampled):
            call.predict(model, at)
        return self._buffers["logits"][: len(step.sampled), : self._shape.vocab]

    def close(self) -> None:
        """End the threads; no call may follow."""
        pool, self._pool = self._pool, None
        if pool:
            self._kernels.pool_close(pool)
            self._kept.clear()

    def _describe(self, weights: TensorFile, pages: torch.Tensor) -> _Model:
        shape = self._shape
        return _Model(
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            intermediate=shape.intermediate,
            vocab=shape.vocab,
            layers=shape.layers,
            block_tokens=pages.shape[3],
            kv_dtype=_DTYPES[pages.dtype],
            pool=self._pool,
            norm_eps=shape.norm_eps,
            scale=1.0 / math.sqrt(shape.head_dim),
            pages=pages.data_ptr(),
            embed=self._pin(weights.float32("embed")),
            head=self._pin(weights.float32("embed" if shape.tied else "lm_head")),
            norm=self._pin(weights.float32("norm")),
            cos=self._pin(self._cos),
            sin=self._pin(self._sin),
        )

    def _layer(self, weights: TensorFile, index: int) -> _Layer:
        names = {name: f"layers.{index}.{name}" for name in _Layer.names}
        return _Layer(**{n: self._pin(weights.float32(key)) for n, key in names.items() if key in weights})

    def _pin(self, array: Array) -> int:
        """Its address, and a reference that keeps it there."""
        self._kept.append(array)
        return int(array.ctypes.data)

    def _step(self, step: Step) -> _Step:
        shape, rows, wanted = self._shape, step.rows, len(step.sampled)
        widths = {
            "x": shape.hidden,
            "h": shape.hidden,
            "qkv": self._width,
            "attended": shape.q_size,
            "mlp": shape.intermediate,
        }
        described = _Step(rows=rows, chunks=step.chunks, wanted_count=wanted, qkv_width=self._width)
        for name in _Step.ints:
            setattr(described, name, getattr(step, name).ctypes.data)
        for name, width in widths.items():
            setattr(described, name, self._buffer(name, rows, width).data_ptr())
        padded = -(-shape.vocab // PANEL) * PANEL
        described.logits = self._buffer("logits", max(wanted, 1), padded).data_ptr()
        return described

    def _buffer(self, name: str, rows: int, width: int) -> torch.Tensor:
        """At least [rows, width], kept and grown by doubling."""
        have = self._buffers.get(name)
        if have is None or len(have) < rows:
            have = torch.empty(max(rows, 2 * len(have) if have is not None else 16), width)
            self._buffers[name] = have
        return have
