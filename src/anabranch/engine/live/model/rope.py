"""Rotary position embedding: inverse frequencies and the cosine/sine tables.

Su et al., RoFormer (2021), §3.4; the "llama3" scaling as in Llama 3.1's reference implementation (`apply_scaling`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.core.errors import ModelFileError

Array = npt.NDArray[np.float32]


def inverse_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None, where: str) -> Array:
    """[head_dim / 2] float32. Raises ModelFileError for a scaling that is not supported."""
    steps = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    base = (1.0 / np.float32(theta) ** steps).astype(np.float32)
    if scaling is None:
        return base
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        return (base / np.float32(scaling["factor"])).astype(np.float32)
    if kind == "llama3":
        return _llama3(base, scaling)
    raise ModelFileError(f"{where}: rope scaling {kind} is not supported; supported are default, linear and llama3")


def _llama3(base: Array, scaling: dict[str, Any]) -> Array:
    factor, original = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    wavelength = 2 * math.pi / base
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * base / factor + smooth * base
    scaled = np.where(wavelength > original / low, base / factor, blended)
    return np.where(wavelength < original / high, base, scaled).astype(np.float32)


def tables(inverse: Array, positions: int) -> tuple[Array, Array]:
    """cos, sin of [positions, head_dim / 2]."""
    angles = np.arange(positions, dtype=np.float32)[:, None] * inverse[None, :]
    return np.cos(angles), np.sin(angles)
