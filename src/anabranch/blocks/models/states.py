"""The constant state of layers that are no attention layers: how many elements one sequence keeps in one of them.

Mamba (Gu and Dao 2023): inner · state, and the last kernel-1 inputs of the convolution. Mamba-2 (Dao and Gu 2024):
heads · head dim · state; its convolution also covers B and C of every group. Gated DeltaNet (Yang et al. 2024) and
linear attention: a matrix of key dim · value dim per head.
"""

from __future__ import annotations

import msgspec

from anabranch.blocks.models.architecture import Fields


class State(msgspec.Struct, frozen=True):
    """Elements per layer and sequence; `recurrent` is the part that engines may hold in a wider dtype."""

    recurrent: int
    convolution: int

    @property
    def elements(self) -> int:
        return self.recurrent + self.convolution


def state_of(config: Fields) -> State | None:
    """The state that the config describes, None if it does not."""
    for describe in (_delta_net, _kimi_delta, _mamba2, _mamba1, _short_convolution, _recurrent_gemma, _lightning):
        found = describe(config)
        if found is not None:
            return found
    return None


def _delta_net(config: Fields) -> State | None:
    key_dim, value_dim = config.number("linear_key_head_dim"), config.number("linear_value_head_dim")
    keys, values = config.number("linear_num_key_heads"), config.number("linear_num_value_heads")
    if not (key_dim and value_dim and keys and values):
        return None
    kernel = config.number("linear_conv_kernel_dim") or 1
    return State(values * key_dim * value_dim, (2 * keys * key_dim + values * value_dim) * (kernel - 1))


def _kimi_delta(config: Fields) -> State | None:
    linear = config.table("linear_attn_config")
    if linear is not None:
        heads, dim, kernel = (linear.number(name) for name in ("num_heads", "head_dim", "short_conv_kernel_size"))
    else:
        heads, dim, kernel = (
            config.number(name) for name in ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
        )
    if not heads or not dim:
        return None
    return State(heads * dim * dim, 3 * heads * dim * ((kernel or 1) - 1))


def _mamba2(config: Fields) -> State | None:
    standalone = config.text("model_type") == "mamba2"
    heads = config.number("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", *(("num_heads",) if standalone else ()))
    size = config.number("mamba_d_state", "ssm_state_size", "state_size")
    if not heads or not size:
        return None
    dim_fields = ("mamba_d_head", "mamba_head_dim", "mamba_headdim", *(("head_dim",) if standalone else ()))
    named = config.raw(*dim_fields)
    if isinstance(named, int):
        inner = heads * named
    else:
        inner = config.number("mamba_d_ssm") or _expansion(config) * (config.number("hidden_size") or 0)
    groups = config.number("mamba_n_groups", "mamba_ngroups", "n_groups") or 1
    return State(inner * size, (inner + 2 * groups * size) * (_kernel(config) - 1))


def _mamba1(config: Fields) -> State | None:
    size, hidden = config.number("mamba_d_state", "state_size"), config.number("hidden_size", "d_model")
    if not size or not hidden:
        return None
    inner = _expansion(config) * hidden
    return State(inner * size, inner * (_kernel(config) - 1))


def _expansion(config: Fields) -> int:
    return config.number("mamba_expand", "expand") or 2


def _kernel(config: Fields) -> int:
    return config.number("mamba_d_conv", "conv_kernel", "d_conv") or 4


def _short_convolution(config: Fields) -> State | None:
    cached, hidden = config.number("conv_L_cache"), config.number("hidden_size")
    return State(0, hidden * (cached - 1)) if cached and hidden else None


def _recurrent_gemma(config: Fields) -> State | None:
    width = config.number("lru_width") or (config.number("hidden_size") if config.raw("block_types") else None)
    return State(width, width * ((config.number("conv1d_width") or 4) - 1)) if width else None


def _lightning(config: Fields) -> State | None:
    heads, width = config.number("num_attention_heads"), config.number("hidden_size")
    if not heads or not width or not config.text("model_type").startswith("minimax"):
        return None
    dim = config.number("head_dim") or width // heads
    return State(heads * dim * dim, 0)
