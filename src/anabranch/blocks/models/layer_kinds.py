"""Which layers attend to everything, to a window, or keep a constant state: the many ways in which configs say it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from anabranch.blocks.models.architecture import Fields
from anabranch.core.errors import ModelFileError

LayerKind = Literal["full", "sliding", "state", "both", "none"]

WORDS: dict[str, LayerKind] = {
    "full_attention": "full",
    "indexed_attention": "full",  # a sparse indexer chooses what to read; all K/V is kept
    "attention": "full",
    "global_attention": "full",
    "global": "full",
    "sliding_attention": "sliding",
    "local_attention": "sliding",
    "local": "sliding",
    "chunked_attention": "sliding",
    "linear_attention": "state",
    "mamba": "state",
    "mamba2": "state",
    "recurrent": "state",
    "conv": "state",
    "hybrid": "both",
    "mlp": "none",
    "moe": "none",
}
NEMOTRON_LETTERS: dict[str, LayerKind] = {"M": "state", "*": "full", "-": "none", "E": "none"}
WINDOW_FIELDS = ("sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size")

# Released configs of these families carry no pattern: the period is part of the architecture.
EVERY_NTH_IS_FULL = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "gemma3n_text": 5, "gemma3n": 5, "cohere2": 4}
EVERY_NTH_IS_FULL["gpt_oss"] = 2
# LongCat-Flash: each of its layers has two attention blocks with a K/V of their own.
ATTENTIONS_PER_LAYER = {"longcat_flash": 2}
ALL_STATE = ("mamba", "mamba2", "falcon_mamba")


def layer_kinds(config: Fields) -> list[LayerKind]:
    """One kind per layer, in order. Raises ModelFileError on a layer type without a meaning here."""
    pattern = config.text("hybrid_override_pattern")
    if pattern:
        return [_word(config, letter, NEMOTRON_LETTERS, "hybrid_override_pattern") for letter in pattern]
    words = config.words("layer_types", "layers_block_type")
    count = config.number("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if words is not None:
        if count and count > len(words):
            raise ModelFileError(f"{config.where}: num_hidden_layers is {count}, layer_types names {len(words)}")
        kinds = [_word(config, word, WORDS, "layer_types") for word in words]
        return _without_window(config, kinds[: count or len(kinds)])
    layers = config.needed("the number of layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    layers *= ATTENTIONS_PER_LAYER.get(config.text("model_type"), 1)
    return _without_window(config, _from_rule(config, layers))


def _word(config: Fields, word: str, meanings: dict[str, LayerKind], field: str) -> LayerKind:
    if word not in meanings:
        known = ", ".join(meanings)
        raise ModelFileError(f"{config.where}: {field} names the unknown layer type {word!r}; known are {known}")
    return meanings[word]


def _without_window(config: Fields, kinds: list[LayerKind]) -> list[LayerKind]:
    """A window of null means that these layers attend to everything."""
    if "sliding" in kinds and not config.number(*WINDOW_FIELDS):
        return ["full" if kind == "sliding" else kind for kind in kinds]
    return kinds


def _from_rule(config: Fields, layers: int) -> list[LayerKind]:
    for rule in (_listed, _periodic, _windowed):
        kind_of = rule(config)
        if kind_of is not None:
            return [kind_of(index) for index in range(layers)]
    return ["full"] * layers


Rule = Callable[[int], LayerKind]


def _listed(config: Fields) -> Rule | None:
    """Layers named one by one; those that do not attend keep a state."""
    codes = config.numbers("attn_type_list")
    if codes is not None:
        known = list(codes)
        return lambda index: "full" if index < len(known) and known[index] == 1 else "state"
    windowed = config.numbers("hybrid_layer_pattern")
    if windowed is not None:  # MiMo-V2: 1 is a sliding window
        local = list(windowed)
        return lambda index: "sliding" if index < len(local) and local[index] == 1 else "full"
    indices = config.numbers("attn_layer_indices") or config.numbers("full_attn_idxs")
    linear = config.table("linear_attn_config")
    if indices is None and linear is not None:
        from_one = linear.numbers("full_attn_layers")
        indices = None if from_one is None else [number - 1 for number in from_one]
    if indices is None:
        return None
    chosen = frozenset(indices)
    return lambda index: "full" if index in chosen else "state"


def _periodic(config: Fields) -> Rule | None:
    period, offset = config.number("attn_layer_period"), config.number("attn_layer_offset") or 0
    if period:
        return lambda index: "full" if index % period == offset else "state"
    interval = config.number("full_attention_interval")
    if interval is None and config.text("model_type") == "qwen3_next":
        interval = 4
    if interval:
        return lambda index: "full" if (index + 1) % interval == 0 else "state"
    words = config.words("block_types")
    if words:  # RecurrentGemma: its attention layers are local
        kinds = [_word(config, word, WORDS, "block_types") for word in words]
        local: list[LayerKind] = ["sliding" if kind == "full" else kind for kind in kinds]
        return lambda index: local[index % len(local)]
    if config.text("model_type") in ALL_STATE:
        return lambda index: "state"
    return None


def _windowed(config: Fields) -> Rule | None:
    if config.raw("use_sliding_window") is False or not config.number(*WINDOW_FIELDS):
        return None
    letters = config.text("sliding_window_pattern")
    if letters and set(letters) <= {"L", "G"}:
        return lambda index: "sliding" if letters[index % len(letters)] == "L" else "full"
    period = config.number("sliding_window_pattern", "_sliding_window_pattern")
    if period is None:
        period = EVERY_NTH_IS_FULL.get(config.text("model_type"))
    if period:
        every = period
        return lambda index: "full" if (index + 1) % every == 0 else "sliding"
    first = config.number("max_window_layers") if config.text("model_type").startswith("qwen") else 0
    return lambda index: "sliding" if index >= (first or 0) else "full"
