"""Runs a real model over the node's pages (`engine.runner.ModelRunner`).

**Covers** choosing the implementation of the forward pass, the view of the arena, and sampling. Computes in float32;
K/V is rounded to the layout's dtype where it is written. No K/V lives anywhere but in the pages.
**See also** `model.native_layers` (compiled kernels), `model.torch_layers` (plain torch), `sampler`.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Literal

import torch

from anabranch.blocks.layout import Dtype
from anabranch.core.errors import ConfigError
from anabranch.core.live import native_build
from anabranch.engine.live.model import native_layers
from anabranch.engine.live.model.step import Layers, build_step
from anabranch.engine.live.model.torch_layers import TorchLayers
from anabranch.engine.live.model.weight_file import TensorFile
from anabranch.engine.live.model_files import WEIGHTS_FILE, load_model_info, load_shape
from anabranch.engine.live.sampler import sample
from anabranch.engine.runner import Chunk, LayerGate, Sampled

log = logging.getLogger(__name__)
Kernels = Literal["auto", "native", "torch"]
_TORCH: dict[str, torch.dtype] = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class TorchRunner:
    """`memory`: writable, `[slots][Full Block]` of the layout that (`kv_dtype`, `block_tokens`) give; borrowed until
    `close`. `threads` 0 = all cores of this process. `kernels`: "native" is compiled at first use, beside the prepared
    directory, and makes results independent of batching and chunking bit for bit; "torch" needs no compiler and is
    slower; "auto" takes the first that works. Raises ModelFileError, ConfigError.
    """

    def __init__(
        self,
        prepared: Path,
        memory: memoryview,
        *,
        kv_dtype: Dtype = "float32",
        block_tokens: int = 16,
        threads: int = 0,
        device: str = "auto",
        kernels: Kernels = "auto",
    ) -> None:
        if device not in ("auto", "cpu"):
            raise ConfigError(f"device {device!r} is not supported; supported are 'auto' and 'cpu'")
        threads = threads or len(os.sched_getaffinity(0))
        self.info = load_model_info(prepared, kv_dtype, block_tokens)
        self._shape = load_shape(prepared)
        layout = self.info.layout
        self.slots = memory.nbytes // layout.full_block_bytes
        if self.slots < 1:
            raise ConfigError(
                f"the arena of {memory.nbytes} bytes holds no block of {layout.full_block_bytes}; enlarge it"
            )
        dims = (self.slots, layout.layers, 2, layout.block_tokens, layout.kv_heads, layout.head_dim)
        used = memory.cast("B")[: self.slots * layout.full_block_bytes]
        self._pages = torch.frombuffer(used, dtype=_TORCH[kv_dtype]).view(dims)
        self._layers = self._choose(prepared, kernels, threads)

    def run(self, batch: list[Chunk], gate: LayerGate) -> list[Sampled]:
        """See `ModelRunner.run`."""
        if not batch:
            return []
        with torch.inference_mode():
            step = build_step(batch, self._shape, self.info.layout.block_tokens, self.slots)
            logits = self._layers.forward(step, gate)
            return sample([chunk for chunk in batch if chunk.sample], logits, self.info.eos_token_ids)

    def copy_page(self, src: int, dst: int, tokens: int) -> None:
        """See `ModelRunner.copy_page`."""
        with torch.inference_mode():
            self._pages[dst, :, :, :tokens] = self._pages[src, :, :, :tokens]

    def close(self) -> None:
        """Let go of the arena: its memoryview can be released afterwards."""
        self._layers.close()
        del self._layers, self._pages

    def _choose(self, prepared: Path, kernels: Kernels, threads: int) -> Layers:
        weights = TensorFile(prepared / WEIGHTS_FILE)
        torch.set_num_threads(threads)
        if kernels == "torch":
            return TorchLayers(self._shape, weights, self._pages)
        problem = native_layers.refusal(self._shape)
        library = problem or native_build.load(native_layers.PACKAGE, native_layers.SOURCES, prepared.parent)
        if not isinstance(library, str):
            # The kernels have their own threads; those of torch would only spin against them between two steps.
            torch.set_num_threads(1)
            return native_layers.NativeLayers(library, self._shape, weights, self._pages, threads)
        if kernels == "native":
            raise ConfigError(f"the compiled kernels cannot be used: {library}; use kernels='torch'")
        log.warning("compiled kernels are not used (%s); plain torch is slower", library)
        return TorchLayers(self._shape, weights, self._pages)
