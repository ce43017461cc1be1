"""Tensors in safetensors files: streamed out one at a time, mapped in without a copy, packed into panels.

A *panel* is 16 output features of a linear layer: a matrix [out, in] is stored as [ceil(out/16)][in][16], the
missing outputs zero. Reading a panel front to back gives, for each input feature, the 16 weights that one SIMD
multiply-add needs. In `gate_up` the panels of gate and up alternate, so both operands of SiLU(gate)·up meet.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from anabranch.core.errors import ModelFileError

PANEL = 16
Array = npt.NDArray[np.float32]
_NUMPY: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


class Planned(msgspec.Struct, frozen=True):
    """A tensor to be written: `make` is called once, when its turn comes."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], Array]


def pack(weight: Array) -> Array:
    """[out, in] → [ceil(out/16), in, 16]."""
    out, width = weight.shape
    short = -out % PANEL
    if short:
        weight = np.concatenate([weight, np.zeros((short, width), np.float32)])
    return np.ascontiguousarray(weight.reshape(-1, PANEL, width).transpose(0, 2, 1))


def unpack(packed: Array, out: int) -> Array:
    """The inverse of `pack`, as a copy."""
    panels, width, _ = packed.shape
    return np.ascontiguousarray(packed.transpose(0, 2, 1)).reshape(panels * PANEL, width)[:out]


def pack_pair(gate: Array, up: Array) -> Array:
    """Alternate the panels of two equal matrices."""
    return np.ascontiguousarray(np.stack([pack(gate), pack(up)], axis=1)).reshape(-1, gate.shape[1], PANEL)


def unpack_pair(packed: Array) -> tuple[Array, Array]:
    out = packed.shape[0] // 2 * PANEL
    return unpack(packed[0::2], out), unpack(packed[1::2], out)


def write(path: Path, planned: list[Planned], seed: bytes, progress: Callable[[float], None]) -> str:
    """Write a float32 safetensors file with one tensor in memory at a time; return hex BLAKE3(seed ‖ header ‖ data)."""
    header: dict[str, Any] = {}
    at = 0
    for tensor in planned:
        size = 4 * int(np.prod(tensor.shape))
        header[tensor.name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    digest = blake3(seed, max_threads=blake3.AUTO)
    done = 0
    with path.open("wb") as file:
        for piece in (len(text).to_bytes(8, "little"), text):
            file.write(piece)
            digest.update(piece)
        for tensor in planned:
            data = np.ascontiguousarray(tensor.make(), dtype="<f4")
            if data.shape != tensor.shape:
                raise ModelFileError(
                    f"tensor {tensor.name} has shape {data.shape}, the configuration says {tensor.shape}"
                )
            raw = data.data.cast("B")
            file.write(raw)
            digest.update(raw)
            done += len(raw)
            progress(done / max(at, 1))
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


class TensorFile:
    """A mapped safetensors file. Arrays are views of the page cache that all processes share.

    Raises ModelFileError if the file is missing, truncated or malformed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.bytes = os.fstat(file.fileno()).st_size
                # Private and writable, never written: torch refuses read-only buffers, and untouched pages stay shared.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ModelFileError(f"cannot read {path}: {error}; copy or prepare the model again") from error
        length = int.from_bytes(self._map[:8], "little")
        try:
            header = json.loads(self._map[8 : 8 + length])
            self._entries = {str(k): v for k, v in header.items() if k != "__metadata__"}
            self._start = 8 + length
            end = max((v["data_offsets"][1] for v in self._entries.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelFileError(f"{path} is not a safetensors file; copy or prepare the model again") from error
        if self._start + end > self.bytes:
            raise ModelFileError(f"{path} is truncated ({self.bytes} bytes of {self._start + end}); copy it again")

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def raw(self, name: str) -> tuple[npt.NDArray[Any], str]:
        """The stored array (bfloat16 as uint16) and its safetensors dtype."""
        if name not in self._entries:
            raise ModelFileError(f"{self.path} has no tensor {name}; copy or prepare the model again")
        entry = self._entries[name]
        kind = entry["dtype"]
        if kind not in _NUMPY:
            raise ModelFileError(f"{self.path}: tensor {name} is {kind}; supported are F32, F16 and BF16")
        first, last = entry["data_offsets"]
        dtype = _NUMPY[kind]
        count = (last - first) // dtype.itemsize
        array = np.frombuffer(self._map, dtype=dtype, count=count, offset=self._start + first)
        return array.reshape(entry["shape"]), kind

    def float32(self, name: str) -> Array:
        """The tensor as float32; a view if it is stored so."""
        array, kind = self.raw(name)
        if kind == "BF16":
            return (array.astype(np.uint32) << 16).view(np.float32)
        return array.astype(np.float32, copy=False)
