"""The transformer layer of recurrent feature heads: one kernel for training-time test and for decoding."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from ..target import Target


def llama_layer_config(target: Target) -> dict[str, Any]:
    """A one-layer Llama config with the target's sizes: heads, head_dim, RoPE and norm epsilon carried over.

    Partial and multi-axis rotary factors are not carried: the head's layer is a plain Llama layer with full rotary at the
    target's base, and that is what every export writes.
    """
    config = target.config
    heads = config.num_attention_heads
    config_dict = LlamaConfig(
        hidden_size=target.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * target.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or target.hidden_size // heads,
        vocab_size=target.vocab_size,
        max_position_embeddings=target.max_positions,
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-5,
        rope_parameters=rope_parameters(config),
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
    ).to_dict()
    return {key: config_dict[key] for key in LAYER_KEYS}


LAYER_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "hidden_act",
)  # fmt: skip


def rope_parameters(config: Any) -> dict[str, Any]:
    """The target's RoPE for full attention: base and scaling; the default base 10000 where it has none."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    rope = dict(rope.get("full_attention", rope))
    for key in ("partial_rotary_factor", "mrope_section", "mrope_interleaved"):
        rope.pop(key, None)
    if rope.get("rope_type", "default") in ("default", "mrope"):
        return {"rope_type": "default", "rope_theta": float(rope.get("rope_theta") or 10000.0)}
    return rope


class FeatureAttention(nn.Module):
    """Llama's attention whose input is ``parts`` states side by side: 2 in EAGLE-3, concat(norm(embedding), norm(feature))."""

    def __init__(self, config: LlamaConfig, parts: int = 2) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        kv_heads, dim = config.num_key_value_heads or heads, config.head_dim or width // heads
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.q_proj = nn.Linear(parts * width, self.heads * dim, bias=False)
        self.k_proj = nn.Linear(parts * width, self.kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(parts * width, self.kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(self.heads * dim, width, bias=False)

    def project(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x [batch, time, parts*hidden] -> q [batch, heads, time, dim], k and v [batch, kv_heads, time, dim], rotated."""
        split = (*x.shape[:-1], -1, self.dim)
        q, k, v = (proj(x).view(split).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        return q, k, v

    def output(self, mixed: Tensor) -> Tensor:
        """[batch, heads, time, dim] -> [batch, time, hidden]."""
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def causal(positions: Tensor) -> Tensor:
    """Which column a row may see, bool [batch, 1, time, time]: the earlier ones of its own sequence, and itself.

    ``positions`` [batch, time] restart at 0 with every sequence that is packed into a row.
    """
    index = torch.arange(positions.shape[-1], device=positions.device)
    start = index - positions  # the column where a row's own sequence begins
    return ((index >= start[..., None]) & (index <= index[:, None]))[:, None]


def unrolled_attention(q: Tensor, keys: list[Tensor], values: list[Tensor], seen: Tensor) -> Tensor:
    """Attention of training-time test: step-0 keys causal, every later step's key only on the diagonal (EAGLE-3, 4.2).

    q [batch, heads, rows, dim] belongs to the last step; keys and values to every step so far: [batch, kv_heads, time, dim]
    of step 0, [batch, kv_heads, rows, dim] of the others; ``seen`` [batch, 1, rows, time] tells which step-0 keys a row sees.
    Row t then sees true features up to t and the chain of its own drafts: exactly what it sees when it drafts.
    """
    batch, heads, rows, dim = q.shape
    kv_heads, time = keys[0].shape[1:3]
    grouped = q.view(batch, kv_heads, heads // kv_heads, rows, dim) * dim**-0.5
    scores = (grouped @ keys[0].unsqueeze(2).transpose(-1, -2)).float().masked_fill(~seen[:, None], float("-inf"))
    own = [(grouped * key.unsqueeze(2)).sum(-1, keepdim=True).float() for key in keys[1:]]
    weights = torch.cat([scores, *own], dim=-1).softmax(-1).to(values[0].dtype)
    mixed = weights[..., :time] @ values[0].unsqueeze(2)
    for step, value in enumerate(values[1:]):
        mixed = mixed + weights[..., time + step : time + step + 1] * value.unsqueeze(2)
    return mixed.view(batch, heads, rows, dim)


class FeatureLayer(nn.Module):
    """EAGLE-3's decoder layer: the embedding enters through the attention, the feature is the residual stream."""

    def __init__(self, config: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = FeatureAttention(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def enter(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The attention's input [batch, time, 2*hidden] and the residual [batch, time, hidden]."""
        normed = self.hidden_norm(hidden)
        return torch.cat([self.input_layernorm(embeds), normed], dim=-1), normed if self.norm_before_residual else hidden

    def leave(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """Add what attention and MLP found to the residual: the layer's output, before any final norm."""
        hidden = residual + self.self_attn.output(mixed)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class PlainLayer(nn.Module):
    """Llama's own decoder layer, in the parts that ``FeatureLayer`` has; ``normed`` False leaves out its input norm."""

    def __init__(self, config: LlamaConfig, normed: bool = True) -> None:
        super().__init__()
        if normed:
            self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.normed = normed
        self.self_attn = FeatureAttention(config, parts=1)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def enter(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The attention's input and the residual, both [batch, time, hidden]."""
        return self.input_layernorm(hidden) if self.normed else hidden, hidden

    def leave(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """Add what attention and MLP found to the residual: the layer's output."""
        hidden = residual + self.self_attn.output(mixed)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


__all__ = [
    "FeatureLayer",
    "LlamaConfig",
    "LlamaRMSNorm",
    "LlamaRotaryEmbedding",
    "PlainLayer",
    "causal",
    "llama_layer_config",
    "unrolled_attention",
]
