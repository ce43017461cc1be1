"""GGUF tokenizer metadata → the `tokenizers` JSON format (byte-level BPE models).

llama.cpp names the pre-tokenizer (`tokenizer.ggml.pre`) instead of storing it; the table below says what each name
means. SmolLM splits every digit off before byte-level splitting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anabranch.core.errors import ModelFileError

Field = Callable[[str, Any], Any]
CONTROL, USER_DEFINED = 3, 4
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _sequence(first: dict[str, Any], use_regex: bool) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [first, _byte_level(use_regex)]}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "smollm": _sequence({"type": "Digits", "individual_digits": True}, True),
    "gpt-2": _byte_level(True),
    "llama-bpe": _sequence(_split(_LLAMA3), False),
    "llama3": _sequence(_split(_LLAMA3), False),
    "llama-v3": _sequence(_split(_LLAMA3), False),
    "qwen2": _sequence(_split(_QWEN2), False),
}


def tokenizer_json(field: Field, where: str) -> dict[str, Any]:
    """Raises ModelFileError for a tokenizer that is not byte-level BPE or whose pre-tokenizer is unknown."""
    model, pre = field("tokenizer.ggml.model", ""), field("tokenizer.ggml.pre", "")
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        raise ModelFileError(
            f"{where}: tokenizer {model or 'none'}/{pre or 'none'} is not supported in a GGUF file; "
            "use the Hugging Face directory of this model"
        )
    tokens, merges = field("tokenizer.ggml.tokens", []), field("tokenizer.ggml.merges", [])
    if not tokens or not merges:
        raise ModelFileError(f"{where}: the tokenizer has no tokens or no merges; copy the file again")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, field("tokenizer.ggml.token_type", [])),
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": PRE_TOKENIZERS[pre],
        "post_processor": _post_processor(field, tokens),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.startswith("llama"),
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }


def tokenizer_config(field: Field) -> dict[str, Any]:
    """Special tokens and the chat template, named as Hugging Face does."""
    tokens = field("tokenizer.ggml.tokens", [])
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": field(f"{field('general.architecture', '')}.context_length", 0),
        "add_bos_token": bool(field("tokenizer.ggml.add_bos_token", False)),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = field(f"tokenizer.ggml.{key}_token_id", None)
        if index is not None and index < len(tokens):
            config[f"{name}_token"] = tokens[index]
    template = field("tokenizer.chat_template", None)
    if template is not None:
        config["chat_template"] = template
    return config


def _added_tokens(tokens: list[str], kinds: list[int]) -> list[dict[str, Any]]:
    return [
        {
            "id": index,
            "content": tokens[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for index, kind in enumerate(kinds)
        if kind in (CONTROL, USER_DEFINED)
    ]


def _post_processor(field: Field, tokens: list[str]) -> dict[str, Any] | None:
    bos = field("tokenizer.ggml.bos_token_id", None)
    if not field("tokenizer.ggml.add_bos_token", False) or bos is None:
        return None
    start = {"SpecialToken": {"id": tokens[bos], "type_id": 0}}
    first, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [start, first],
        "pair": [start, first, second],
        "special_tokens": {tokens[bos]: {"id": tokens[bos], "ids": [bos], "tokens": [tokens[bos]]}},
    }
