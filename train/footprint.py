"""What a run takes, from shapes alone: memory of a process, arithmetic of a token, bytes on disk; each with its origin.

Nothing here is measured. The activations are an estimate: what a head's linear maps read and write, a quarter more for norms
and nonlinearities, and the attention scores of the kinds that write them out (tests/train/test_footprint.py holds it against
what autograd keeps). Not counted: what the target's own forward needs for a moment, communication, fragmentation.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..data.engine import layers_for
from ..data.precision import bytes_per_token
from ..heads.base import DraftHead
from ..recipes.schema import Recipe
from ..target import Target
from .step import fitting_rows, row_bytes

AROUND = 1.25  # what is kept for backward, as a multiple of what linear maps read and write
UNROLLED = ("eagle", "eagle3", "mtp")  # kinds that run their layers once for every depth
SCORED = ("eagle", "eagle3", "peagle")  # kinds whose attention keeps its scores, in float32
FLOAT32 = 4


@dataclass(frozen=True)
class Amount:
    """A number of bytes, and the words for what it was computed from."""

    bytes: float
    origin: str

    def as_json(self) -> dict[str, Any]:
        return {"GB": round(self.bytes / 1e9, 4), "from": self.origin}


def memory(recipe: Recipe, target: Target, head: DraftHead, dtype: torch.dtype, device: torch.device) -> dict[str, Amount]:
    """The memory of one process, part by part; ``dtype`` is the target's, ``device`` tells how long pieces of logits are."""
    trained, frozen = counted(head)
    read_out = sum(p.numel() for p in readouts(head) if p.requires_grad)
    lines, length = recipe.train.micro_batch_size, recipe.data.max_length
    half = recipe.train.precision == "bf16"
    again = recipe.train.gradient_checkpointing
    kept = (edges(head, length) if again else linear_width(head, length) * AROUND) * (2 if half else FLOAT32)
    kept += 0 if again else score_bytes(head, length)
    sizes = [head.config.draft_vocab_size] * head.config.depths
    per_row = row_bytes(target.vocab_size, sizes)
    rows = min(lines * length, fitting_rows(device, per_row))
    tokens = f"{lines} conversations x {length:,} tokens (train.micro_batch_size, data.max_length)"
    loaded = ends(target) if recipe.data.engine else numbers(target.model)
    found = {
        "target weights": Amount(
            loaded * dtype.itemsize, f"{loaded:,} parameters x {dtype.itemsize} bytes ({name(dtype)}), {spread(recipe)}"
        ),
        "head weights": Amount((trained + frozen) * FLOAT32, f"{trained + frozen:,} parameters x 4 bytes (float32)"),
        "gradients": Amount(
            (trained + read_out) * FLOAT32,
            f"({trained:,} trained parameters + {read_out:,} of the output heads, summed over the pieces) x 4 bytes",
        ),
        "optimizer": Amount(2 * trained * FLOAT32, f"AdamW's two moments: 2 x {trained:,} x 4 bytes"),
        "features": Amount(
            lines * length * feature_bytes(target, head, dtype), f"{tokens} x {feature_bytes(target, head, dtype):,} bytes"
        ),
        "activations": Amount(
            lines * length * kept,
            f"{tokens} x about {round(kept):,} bytes ({passes(head, length):.3g} passes of the layers"
            + (", computed again in the backward pass)" if again else ")"),
        ),
        "logits": Amount(
            rows * per_row,
            f"pieces of {rows} rows ({device.type}; never more than a sixteenth of the free memory) x {per_row:,} bytes "
            f"(vocabulary {target.vocab_size:,}, {len(sizes)} depths of {sizes[0]:,})",
        ),
    }
    if half:
        found["autocast"] = Amount(2 * trained, f"{trained:,} trained parameters x 2 bytes (their bfloat16 copies)")
    if recipe.data.engine:
        ahead, layers = recipe.data.engine.ahead, len(recipe.data.engine.layers or layers_for(head.config.taps, target.depth))
        size = layers * target.hidden_size * dtype.itemsize
        found["states ahead"] = Amount(
            ahead * length * size, f"{ahead} conversations (data.engine.ahead) x {length:,} tokens x {size:,} bytes"
        )
    return found


def ends(target: Target) -> int:
    """The numbers in a target's embedding and output head, tied ones once; its final norm is next to nothing."""
    return sum({id(p): p.numel() for end in (target.embed, target.output_head) for p in end.parameters()}.values())


def arithmetic(target: Target, head: DraftHead, length: int) -> dict[str, float]:
    """FLOPs of one token: the target's forward, its output head for the teacher, the head's forward and backward.

    A multiplication and an addition are two. Of a mixture of experts those that a token goes through count. Attention over a
    text of ``length`` tokens counts half of its square.
    """
    config = target.config
    experts = sum(p.numel() for n, p in target.model.named_parameters() if ".experts." in n)
    chosen = getattr(config, "num_experts_per_tok", 0) / max(1, getattr(config, "n_routed_experts", None) or 1)
    embedding, output = (module.get_parameter("weight").numel() for module in (target.embed, target.output_head))
    tied = target.output_head.weight is target.embed.get_parameter("weight")
    layers = numbers(target.model) - experts * (1 - chosen if experts else 0) - output - (0 if tied else embedding)
    dim = getattr(config, "v_head_dim", None) or getattr(config, "head_dim", None)
    width = config.num_attention_heads * dim if dim else target.hidden_size
    mixed = sum(map_.in_features * map_.out_features * times for map_, times in applied(head, length))
    logits = head.config.depths * head.config.draft_vocab_size * head.width(head.config)
    return {
        "target": 2 * layers + 2 * length * width * target.depth,
        "teacher": 2.0 * output,
        "head": 6 * mixed,
        "head logits": 6.0 * logits,
    }


def checkpoint_bytes(head: DraftHead) -> int:
    """A training checkpoint: the head and AdamW's two moments, float32."""
    trained, frozen = counted(head)
    return (3 * trained + frozen) * FLOAT32


def store_bytes(recipe: Recipe, target: Target, head: DraftHead) -> float:
    """Bytes of a token in a store or a write-through store of the recipe's dtype: states, id and mask."""
    return 5 + bytes_per_token(target.hidden_size, len(head.config.taps), recipe.data.store_dtype)


def feature_bytes(target: Target, head: DraftHead, dtype: torch.dtype) -> int:
    """Bytes of the hidden states that one token's taps and last state are."""
    return (len(head.config.taps) + 1) * target.hidden_size * dtype.itemsize


def counted(head: nn.Module) -> tuple[int, int]:
    """Trained and frozen parameters."""
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    return trained, numbers(head) - trained


def numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def readouts(head: DraftHead) -> list[Tensor]:
    """The weights of the head's own output heads."""
    return [map_.weight for map_ in head.modules() if isinstance(map_, nn.Linear) and reads_out(map_, head)]


def reads_out(map_: nn.Linear, head: DraftHead) -> bool:
    return map_.out_features in (head.config.draft_vocab_size, head.config.target.vocab_size)


def applied(head: DraftHead, length: int) -> list[tuple[nn.Linear, float]]:
    """The head's linear maps below its output heads, and how often each is applied to a token of a text of ``length``."""
    maps = [(label, map_) for label, map_ in head.named_modules() if isinstance(map_, nn.Linear) and not reads_out(map_, head)]
    once = ("fc", "prefix", "q_norm")  # what fuses the taps, and Hydra's layer, see every token once
    times = passes(head, length)
    return [(map_, 1.0 if label.split(".")[0] in once else times) for label, map_ in maps]


def linear_width(head: DraftHead, length: int) -> float:
    """What the head's linear maps read and write for one token, in numbers."""
    return sum((map_.in_features + map_.out_features) * times for map_, times in applied(head, length))


def edges(head: DraftHead, length: int) -> float:
    """What is kept of one token where stretches are computed again: what goes into them and comes out, in numbers."""
    return 2 * head.config.target.hidden_size * (passes(head, length) + head.config.depths)


def passes(head: DraftHead, length: int) -> float:
    """How often a token's row goes through the head's layers in one training forward."""
    depths, options = head.config.depths, head.options
    if head.kind in UNROLLED or head.kind == "redrafter":
        return depths
    if head.kind == "mlp_speculator":
        return depths / 2 if options.tie_weights else 1.0  # two projections for all depths, or one for each
    if head.kind in ("peagle", "pard"):
        return sum(max(options.ratio**depth, options.ratio_min) for depth in range(depths))
    if head.kind == "dflash":
        return min(options.anchors, length) * (depths + 1) / length
    return 1.0


def score_bytes(head: DraftHead, length: int) -> float:
    """Bytes of attention scores that a token keeps."""
    if head.kind not in SCORED:
        return 0.0
    return (
        head.config.layer["num_attention_heads"] * length * FLOAT32 * passes(head, length) * getattr(head.options, "layers", 1)
    )


def spread(recipe: Recipe) -> str:
    """Where the target's weights are."""
    if recipe.data.engine:
        return "embedding and output head alone (data.engine), on every process"
    if recipe.target.parallel:
        return f"its layers over target.group or all processes (target.parallel: {recipe.target.parallel})"
    return "over all devices (target.device: auto)" if recipe.target.device == "auto" else "whole on every process"


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
