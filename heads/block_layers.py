"""The layers of a block drafter: queries of a block alone, keys and values of the target's context and of the block.

DFlash (2602.06036): every layer projects the same context features to its own keys and values, next to those of its block.
DFlash 2 (its published code, MIT): a short convolution along the block around each attention and each MLP.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, rotate_half

Rotary = tuple[Tensor, Tensor]  # cosines and sines [..., time, dim]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v of blocks [n, heads, block, dim] -> mixed, like q

ROWS = 1024  # queries in one attention: their mask is written out


def rotated(x: Tensor, rotary: Rotary) -> Tensor:
    """x [..., heads, time, dim] turned to its positions."""
    cos, sin = (part.unsqueeze(-3) for part in rotary)
    return x * cos + rotate_half(x) * sin


class BlockAttention(nn.Module):
    """Qwen3's attention, queries and keys normed head by head, with keys and values to be had without queries."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        kv_heads, dim = config.num_key_value_heads or heads, config.head_dim or width // heads
        self.dim = dim
        self.q_proj = nn.Linear(width, heads * dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, width, bias=False)
        self.q_norm = Qwen3RMSNorm(dim, config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(dim, config.rms_norm_eps)

    def heads(self, x: Tensor) -> Tensor:
        """[..., time, heads * dim] -> [..., time, heads, dim]."""
        return x.unflatten(-1, (-1, self.dim))

    def keys(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """x [..., time, hidden] -> keys and values [..., kv_heads, time, dim]."""
        k = rotated(self.k_norm(self.heads(self.k_proj(x))).transpose(-2, -3), rotary)
        return k, self.heads(self.v_proj(x)).transpose(-2, -3)

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """Blocks x [n, block, hidden] -> what their attention found [n, block, hidden]."""
        q = rotated(self.q_norm(self.heads(self.q_proj(x))).transpose(-2, -3), rotary)
        return self.o_proj(attend(q, *self.keys(x, rotary)).transpose(-2, -3).flatten(-2))


class BlockConvolution(nn.Module):
    """DFlash 2's two-tap convolution along a block, before and after a sublayer: y_j = k_0 * x_j + k_1 * x_{j-1}.

    Each kernel is learned per channel, plus a correction per group of channels that the sublayer's input calls for. It
    never reaches out of its block, and starts as the identity. ``base_kernel`` [before or after, tap, hidden].
    """

    TAPS = 2

    def __init__(self, width: int, group: int) -> None:
        super().__init__()
        self.group = group
        self.base_kernel = nn.Parameter(torch.zeros(2, self.TAPS, width))
        self.kernel_projection = nn.Linear(width, 2 * self.TAPS * (width // group), bias=False)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def kernels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The kernels [n, block, tap, hidden] that the input x [n, block, hidden] calls for: before and after."""
        asked = self.kernel_projection(x).unflatten(-1, (2, self.TAPS, -1)).repeat_interleave(self.group, dim=-1)
        before, after = (self.base_kernel + asked).unbind(-3)
        return before, after

    @staticmethod
    def convolve(x: Tensor, kernel: Tensor) -> Tensor:
        earlier = F.pad(x[:, :-1], (0, 0, 1, 0))
        return kernel[:, :, 0] * x + kernel[:, :, 1] * earlier


class BlockLayer(nn.Module):
    """A Qwen3 decoder layer over blocks; with ``group`` also DFlash 2's convolutions around attention and MLP."""

    def __init__(self, config: Qwen3Config, group: int | None) -> None:
        super().__init__()
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Qwen3MLP(config)
        self.attention_conv = BlockConvolution(config.hidden_size, group) if group else None
        self.mlp_conv = BlockConvolution(config.hidden_size, group) if group else None

    def forward(self, hidden: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """Blocks [n, block, hidden] -> the same."""

        def attention(x: Tensor) -> Tensor:
            return self.self_attn(x, rotary, attend)

        hidden = hidden + around(self.attention_conv, attention, self.input_layernorm(hidden))
        return hidden + around(self.mlp_conv, self.mlp, self.post_attention_layernorm(hidden))


def in_context(
    layer: BlockLayer, hidden: Tensor, rotary: Rotary, context: Tensor, before: Rotary, pieces: list["Piece"]
) -> Tensor:
    """A layer over blocks [n, block, hidden] behind a context [lines, time, hidden], each rotated to its own positions."""
    keys, values = layer.self_attn.keys(context, before)
    return layer(hidden, rotary, attention_over(keys, values, pieces))


def around(convolution: BlockConvolution | None, sublayer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A sublayer's answer to x, with a convolution on both sides of it where there is one."""
    if convolution is None:
        return sublayer(x)
    before, after = convolution.kernels(x)
    return convolution.convolve(sublayer(convolution.convolve(x, before)), after)


@dataclass
class Piece:
    """Blocks that attend at once, all of one line: ``blocks`` among all, the context's ``columns`` that any of them sees,
    and ``seen`` [blocks * block, columns + blocks * block], who sees whom."""

    line: int
    blocks: slice
    columns: slice
    seen: Tensor


def cut(
    line: Tensor, first: Tensor, last: Tensor, block: int, heads_per_key: int, causal: bool, window: int | None
) -> list[Piece]:
    """How n blocks attend, in pieces of about ROWS queries, so that a mask never spans all blocks of a batch.

    ``line``, ``first``, ``last`` [n] rising: a block sees columns first..last of its line, of which the last is the one
    right before the block, and its own rows: all of them, or with ``causal`` those up to the query. With ``window`` a query
    sees no column that lies so far back.
    """
    most = max(1, ROWS // (block * heads_per_key))
    counts = torch.bincount(line).tolist() if len(line) else []
    offsets = torch.arange(block, device=line.device)
    own = torch.ones(block, block, dtype=torch.bool, device=line.device)
    own = own.tril() if causal else own
    pieces, begin = [], 0
    for where, count in enumerate(counts):
        for start in range(begin, begin + count, most):
            blocks = slice(start, min(start + most, begin + count))
            low, high = int(first[blocks].min()), int(last[blocks].max()) + 1
            columns = torch.arange(low, high, device=line.device)
            seen = (columns >= first[blocks, None]) & (columns <= last[blocks, None])
            seen = seen[:, None].expand(-1, block, -1)
            if window is not None:
                queries = last[blocks, None] + 1 + offsets
                seen = seen & (columns > queries[..., None] - window)
            apart = torch.eye(len(seen), dtype=torch.bool, device=line.device)
            seen = torch.cat([seen.flatten(0, 1), torch.kron(apart, own)], dim=1)
            pieces.append(Piece(where, blocks, slice(low, high), seen))
        begin += count
    return pieces


def attention_over(keys: Tensor, values: Tensor, pieces: list[Piece]) -> Attend:
    """How blocks attend to a context with these keys and values [lines, kv_heads, time, dim], and to themselves."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # without blocks the context still has gradients, of zero: another process may have blocks, and waits for them
        none = q[:0] + k[:0].sum() + v[:0].sum() + keys[:, :, :0].sum() + values[:, :, :0].sum()
        return torch.cat([none, *(attended(piece, q, k, v, keys, values) for piece in pieces)])

    return attend


def attended(piece: Piece, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One piece's share of ``attend``. The query heads that share a key head are laid out as rows of it."""
    blocks, kv_heads = piece.blocks, k.shape[1]
    queries = q[blocks].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3, 4)  # [kv_heads, group, blocks, block, dim]
    seen = piece.seen.repeat(queries.shape[1], 1)
    joined = [
        torch.cat([context[piece.line, :, piece.columns], own[blocks].transpose(0, 1).flatten(1, 2)], dim=1)
        for context, own in ((keys, k), (values, v))
    ]
    mixed = F.scaled_dot_product_attention(queries.flatten(1, 3)[None], *(part[None] for part in joined), attn_mask=seen)[0]
    return mixed.view(queries.shape).permute(2, 0, 1, 3, 4).flatten(1, 2)
