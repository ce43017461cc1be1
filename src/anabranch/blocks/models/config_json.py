"""A Hugging Face `config.json` → Architecture.

Not a table of models but a reading of fields, so that a new model of a known kind needs no new line here.
"""

from __future__ import annotations

from anabranch.blocks.models.architecture import Architecture, Attention, Fields, LayerKeeps, attention_name
from anabranch.blocks.models.layer_kinds import WINDOW_FIELDS, LayerKind, layer_kinds
from anabranch.blocks.models.states import State, state_of
from anabranch.core.errors import ModelFileError

NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels")
WIDTH = ("hidden_size", "n_embd", "d_model", "emb_dim")
CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")


def architecture_of(config: object, where: str = "config.json") -> Architecture:
    """Read a parsed config.json. Raises ModelFileError naming the fields it looked for and did not find."""
    if not isinstance(config, dict):
        raise ModelFileError(f"{where}: expected a JSON object with a model's configuration")
    outer, fields = config, Fields(config, where)
    for _ in range(3):  # Omni models nest twice
        inner = fields.table(*NESTED)
        if inner is None:
            break
        fields = inner
    if fields.raw("is_encoder_decoder") is True:
        raise ModelFileError(f"{where}: encoder-decoder models are not supported (is_encoder_decoder is true)")
    kinds = layer_kinds(fields)
    state = state_of(fields) if _has(kinds, "state", "both") else None
    attends = _has(kinds, "full", "sliding", "both")
    name, templates = _templates(fields, len(kinds)) if attends else ("none", [LayerKeeps()] * len(kinds))
    layers = [_layer(kind, template, fields, state) for kind, template in zip(kinds, templates, strict=True)]
    return Architecture(
        name=fields.text("model_type") or str(outer.get("model_type") or "unknown"),
        attention=name,
        layers=tuple(_shared(layers, fields)),
        context_tokens=fields.number(*CONTEXT) or 0,
        dtype=(
            fields.text("dtype", "torch_dtype") or str(outer.get("dtype") or outer.get("torch_dtype") or "")
        ).lower(),
        state_dtype=fields.text("mamba_ssm_cache_dtype", "mamba_ssm_dtype"),
        notes=tuple(_notes(fields, kinds, state)),
    )


def _has(kinds: list[LayerKind], *wanted: LayerKind) -> bool:
    return any(kind in wanted for kind in kinds)


def _layer(kind: LayerKind, template: LayerKeeps, fields: Fields, state: State | None) -> LayerKeeps:
    if kind == "none":
        return LayerKeeps()
    kept, recurrent = (state.elements, state.recurrent) if state and kind in ("state", "both") else (0, 0)
    if kind == "state":
        return LayerKeeps(state_elements=kept, recurrent_elements=recurrent)
    window = (fields.number(*WINDOW_FIELDS) or 0) if kind == "sliding" else 0
    heads, elements = template.heads, template.head_elements
    if kind == "full" and (wide := fields.number("global_head_dim")):  # Gemma 4: full layers have their own shape
        elements, heads = 2 * wide, fields.number("num_global_key_value_heads") or heads
    if kind == "sliding" and not template.replicated:  # MiMo-V2: so have sliding layers
        heads = fields.number("swa_num_key_value_heads") or heads
        if narrow := fields.number("swa_head_dim"):
            elements = narrow + (fields.number("swa_v_head_dim") or narrow)
    return LayerKeeps(
        heads=heads,
        head_elements=elements,
        replicated=template.replicated,
        window=window,
        state_elements=kept,
        recurrent_elements=recurrent,
    )


def _templates(fields: Fields, layers: int) -> tuple[Attention, list[LayerKeeps]]:
    """Each layer as if it attended to everything."""
    latent = fields.number("kv_lora_rank")
    if latent:
        rope = fields.needed("the rotary part of the MLA latent", "qk_rope_head_dim")
        return "MLA", [LayerKeeps(heads=1, head_elements=latent + rope, replicated=True)] * layers
    heads = _heads(fields)
    per_layer = _kv_heads(fields, heads, layers)
    dim = fields.number(*HEAD_DIM) or _derived_head_dim(fields, heads)
    elements = dim + (fields.number("v_head_dim") or dim)
    name = attention_name(heads, max(per_layer, default=heads))
    return name, [LayerKeeps(heads=count, head_elements=elements) for count in per_layer]


def _heads(fields: Fields) -> int:
    per_layer = fields.numbers("num_query_heads") or fields.numbers("num_attention_heads")
    return max(per_layer) if per_layer else fields.needed("the number of attention heads", *HEADS)


def _derived_head_dim(fields: Fields, heads: int) -> int:
    width = fields.needed("the size of a head", *HEAD_DIM, *WIDTH)
    if width % heads:
        raise ModelFileError(f"{fields.where}: no head_dim, and hidden size {width} is no multiple of {heads} heads")
    return width // heads


def _kv_heads(fields: Fields, heads: int, layers: int) -> list[int]:
    for name in KV_HEADS:  # OpenELM: one number per layer
        listed = fields.numbers(name)
        if listed is not None:
            if len(listed) != layers:
                raise ModelFileError(f"{fields.where}: {name} names {len(listed)} layers of {layers}")
            return listed
    blocks = fields.raw("block_configs")
    if isinstance(blocks, list):
        return _searched(fields, blocks, heads, layers)
    if fields.raw("multi_query") is True and fields.raw("new_decoder_architecture") is not True:
        return [1] * layers
    nested = fields.table("attn_config")
    count = fields.number(*KV_HEADS) or (nested.number("kv_n_heads") if nested else None)
    return [count or heads] * layers


def _searched(fields: Fields, blocks: list[object], heads: int, layers: int) -> list[int]:
    """Models found by architecture search (Nemotron Super, Ultra): each layer has a group size of its own, or none."""
    counts = []
    for block in blocks:
        attention = block.get("attention") if isinstance(block, dict) else None
        group = attention.get("n_heads_in_group") if isinstance(attention, dict) else None
        counts.append(heads // group if isinstance(group, int) and group > 0 else 0)
    if len(counts) != layers:
        raise ModelFileError(f"{fields.where}: block_configs names {len(counts)} layers of {layers}")
    return counts


def _shared(layers: list[LayerKeeps], fields: Fields) -> list[LayerKeeps]:
    """Layers that read another layer's K/V keep none of their own."""
    shared = fields.number("num_kv_shared_layers") or 0
    if shared >= len(layers) > 0 and shared:
        raise ModelFileError(f"{fields.where}: num_kv_shared_layers is {shared}, of {len(layers)} layers")
    layers = layers[: len(layers) - shared] + [LayerKeeps()] * shared
    factor = fields.number("cla_share_factor") if fields.raw("use_cla") is True else None
    if factor:
        return [layer if index % factor == 0 else LayerKeeps() for index, layer in enumerate(layers)]
    return layers


def _notes(fields: Fields, kinds: list[LayerKind], state: State | None) -> list[str]:
    notes = []
    if state is None and (count := sum(kind in ("state", "both") for kind in kinds)):
        notes.append(f"the config does not describe the constant state of {count} layers: it is not counted")
    if fields.number("index_head_dim") and fields.number("kv_lora_rank"):
        notes.append("keys of the sparse-attention indexer (index_head_dim) are not counted")
    shared = fields.number("num_kv_shared_layers")
    if shared:
        notes.append(f"the last {shared} layers reuse K/V of earlier layers")
    return notes
