"""A Hugging Face model directory (config.json, safetensors, tokenizer files) as a source of weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec

from anabranch.core.errors import ModelFileError
from anabranch.engine.live.model.rope import inverse_frequencies
from anabranch.engine.live.model.weight_file import Array, TensorFile
from anabranch.engine.live.model_files import (
    CONFIG_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    ModelShape,
    parse_shape,
    read_json,
)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class HfSource:
    """Raises ModelFileError if a file is missing or the architecture is not supported."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.name = directory.resolve().name
        self.config = self._read_config()
        self.shape: ModelShape = parse_shape(self.config, str(directory))
        self._files: dict[str, TensorFile] = {}
        self._where = self._locate()

    @property
    def inv_freq(self) -> Array:
        shape = self.shape
        return inverse_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling, str(self._directory))

    def tensor(self, name: str) -> Array:
        """float32, by Hugging Face name."""
        if name not in self._where:
            raise ModelFileError(f"{self._directory} has no tensor {name}; the download is incomplete, get it again")
        return self._open(self._where[name]).float32(name)

    def unknown(self, expected: set[str]) -> list[str]:
        """Tensors that a supported model does not have (buffers apart)."""
        return sorted(n for n in self._where if n not in expected and not n.endswith("rotary_emb.inv_freq"))

    def write_tokenizer(self, target: Path) -> None:
        source = self._directory / TOKENIZER_FILE
        if not source.is_file():
            raise ModelFileError(
                f"{self._directory} has no {TOKENIZER_FILE}; save it with a fast tokenizer and try again"
            )
        read_json(source)
        shutil.copyfile(source, target / TOKENIZER_FILE)
        settings = read_json(self._directory / TOKENIZER_CONFIG_FILE)
        template = self._directory / "chat_template.jinja"
        if "chat_template" not in settings and template.is_file():
            settings["chat_template"] = template.read_text(encoding="utf-8")
        (target / TOKENIZER_CONFIG_FILE).write_bytes(msgspec.json.encode(settings))

    def _read_config(self) -> dict[str, Any]:
        config = read_json(self._directory / CONFIG_FILE)
        generation = self._directory / "generation_config.json"
        if generation.is_file():
            eos = read_json(generation).get("eos_token_id")
            if eos is not None:
                config["eos_token_id"] = eos
        return config

    def _locate(self) -> dict[str, str]:
        """Tensor name → file name."""
        index = self._directory / INDEX_FILE
        if index.is_file():
            names = read_json(index).get("weight_map")
            if not isinstance(names, dict):
                raise ModelFileError(f"{index} has no weight_map; copy the file again")
            for file in sorted(set(names.values())):
                self._open(file)
            return {str(k): str(v) for k, v in names.items()}
        if not (self._directory / SINGLE_FILE).is_file():
            raise ModelFileError(
                f"{self._directory} has neither {SINGLE_FILE} nor {INDEX_FILE}; convert it to safetensors"
            )
        return dict.fromkeys(self._open(SINGLE_FILE), SINGLE_FILE)

    def _open(self, file: str) -> TensorFile:
        if file not in self._files:
            self._files[file] = TensorFile(self._directory / file)
        return self._files[file]
