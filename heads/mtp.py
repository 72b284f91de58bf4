"""Multi-token prediction, as in DeepSeek-V3 (2412.19437) and Qwen3-Next: one decoder layer of the target's own family.

The embedding of x_{t+1} and the target's hidden state at t are normed, joined and projected; the layer reads that, and its
normed output goes through the target's own output head. One layer serves every depth: it is fed its normed output, as in
FastMTP (2509.18362) and by the engines. The layer and the norm behind it are a one-layer decoder that transformers builds
from the target's config, so they are the family's own, whatever it is.
"""

import copy
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, DynamicCache

from .. import weights
from ..errors import UserError, first_line
from ..target import Features, Target, attention_kinds
from . import own_lm
from .base import Depth, DraftHead, Guess, HeadConfig, Shape, marked
from .layers import causal
from .mtp_forms import FORMS, Form, find, to_ours

TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")  # the layer has no embedding that they could be rows of


class MtpOptions(BaseModel):
    """The kind's own part of a recipe.

    ``form``: which published module this one is like. ``hidden``: the target's state before or after its final norm; null:
    what vLLM feeds a module of this form. ``init``: module takes the module that the target's checkpoint carries, target the
    target's own last layer.
    """

    model_config = ConfigDict(extra="forbid")
    form: Literal["qwen", "deepseek", "mimo"] = "qwen"
    hidden: Literal["post_norm", "pre_norm"] | None = None
    init: Literal["random", "target", "module"] = "target"

    @property
    def pre_norm(self) -> bool:
        return FORMS[self.form].pre_norm if self.hidden is None else self.hidden == "pre_norm"


@dataclass
class MtpState(own_lm.OwnState):
    """``fed``: by node, what the layer reads below it [1, hidden]."""

    fed: dict[int, Tensor] = field(default_factory=dict)


class MtpHead(DraftHead):
    """norm(embedding), norm(hidden) -> input_proj -> the target's kind of layer and norm -> the target's output head."""

    kind = "mtp"
    Options = MtpOptions

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        if config.draft_vocab_size != config.target.vocab_size:
            raise UserError("an mtp head is read out by the target's own output head: set head.draft_vocab to null.")
        width = config.target.hidden_size
        self.decoder = build(config.layer)
        self.token_norm, self.hidden_norm = copy.deepcopy(self.decoder.norm), copy.deepcopy(self.decoder.norm)
        self.input_proj = nn.Linear(2 * width, width, bias=False)

    @property
    def form(self) -> Form:
        return FORMS[self.options.form]

    @classmethod
    def create(
        cls,
        target: Target,
        options: Any,
        taps: list[int] | None,
        depths: int,
        target_ids: Tensor,
        confidence: bool = False,
    ) -> Self:
        read = [target.depth] if options.pre_norm else []
        if taps not in (None, read):
            raise UserError(f"this mtp head reads taps {read}, as its options say, not {taps}: leave head.taps out.")
        return super().create(target, options, read, depths, target_ids, confidence)

    @classmethod
    def layer_config(cls, target: Target, options: Any) -> dict[str, Any]:
        """The target's config, cut down to one layer: that of its own last one, which has full attention where any has."""
        config, last = copy.deepcopy(target.config), last_layer(target)
        for name, value in list(vars(config).items()):
            if "layer" in name and isinstance(value, list) and len(value) == target.depth:  # one entry a layer
                setattr(config, name, [value[last]])
        for name in ("layer_types", "mlp_layer_types"):  # what a family says of its own module
            if getattr(config, f"mtp_{name}", None):
                setattr(config, name, getattr(config, f"mtp_{name}")[:1])
        for name, value in {"num_hidden_layers": 1, "vocab_size": 1, **dict.fromkeys(TOKENS)}.items():
            setattr(config, name, value)
        if getattr(config, "first_k_dense_replace", None):
            config.first_k_dense_replace = 0
        layer = {"model_type": config.model_type, **own_lm.plain(config)}
        layer.pop("quantization_config", None)
        return layer

    def initialize(self, target: Target) -> None:
        if self.target_ids.is_meta or self.options.init == "random":  # a dry run has no weights
            return
        if self.options.init == "module":
            self.take(module_of(target, self.options.form, self.config.layer))
        else:
            self.warm_up(target)

    def take(self, tensors: dict[str, Tensor]) -> None:
        """Load the tensors of a module by the head's names; UserError where one is missing or does not fit."""
        for name, own in self.state_dict().items():
            if name == "target_ids" or name.startswith("confidence.") or own.shape == getattr(tensors.get(name), "shape", None):
                continue
            given = list(tensors[name].shape) if name in tensors else None
            raise UserError(f"the target's module gives {name} the shape {given}, its own layers ask for {list(own.shape)}.")
        self.load_state_dict(tensors, strict=False)

    @torch.no_grad()
    def warm_up(self, target: Target) -> None:
        """Start as the target's last layer and final norm.

        The projection passes the hidden state through at the size of what that layer reads in the target, so that what it
        adds weighs as much; the embedding joins at a tenth of its random size.
        """
        layer, source = self.decoder.layers[0].state_dict(), target.weights_of(target.layers[last_layer(target)])
        fits = {name: tensor.shape for name, tensor in layer.items()} == {name: t.shape for name, t in source.items()}
        if not fits or target.final_norm is None:
            raise UserError(
                f"init: target needs a last layer in {target.name!r} that can stand alone: set head.options.init to random."
            )
        self.decoder.layers[0].load_state_dict(source)
        self.decoder.norm.load_state_dict(target.final_norm.state_dict())
        ids = torch.randint(target.vocab_size, (1, 64), generator=torch.Generator().manual_seed(0))
        size = target.features(ids, [last_layer(target)]).taps.float().pow(2).mean().sqrt().cpu()
        width = target.hidden_size
        token, hidden = self.input_proj.weight[:, :width], self.input_proj.weight[:, width:]
        if self.form.hidden_first:
            token, hidden = hidden, token
        token.mul_(0.1 * size)
        hidden.copy_(size * torch.eye(width))

    # -- what it computes --------------------------------------------------------------------------------------

    def read(self, features: Features) -> Tensor:
        """The target's hidden states [..., hidden] that depth 0 reads."""
        return (features.taps if self.options.pre_norm else features.last).to(self.input_proj.weight.dtype)

    def enter(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """What the layer reads [..., hidden]."""
        joined = [self.token_norm(embeds.to(hidden.dtype)), self.hidden_norm(hidden)]
        return self.input_proj(torch.cat(joined[::-1] if self.form.hidden_first else joined, dim=-1))

    def embed(self, tokens: Tensor, positions: Tensor, target: Target) -> Tensor:
        """Embeddings [..., hidden] of the tokens behind the rows at ``positions``."""
        embeds = target.embed(tokens)
        return embeds.masked_fill((positions == 0)[..., None], 0) if self.form.blank_first else embeds

    def predict(
        self, ids: Tensor, rows: list[Tensor], features: Features, target: Target, positions: Tensor | None = None
    ) -> list[Depth]:
        """Unrolled: at step i a row sees the step-0 keys up to its own, and the keys of its own chain alone."""
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        behind = causal(positions)[:, 0]  # [batch or 1, time, time]
        itself = torch.eye(ids.shape[1], dtype=torch.bool, device=ids.device).expand_as(behind)
        earlier: list[Tensor] = []  # keys and values of the steps before
        hidden, after, depths = self.read(features), ids, []
        for step, own in enumerate(rows):
            after = F.pad(after[:, 1:], (0, 1))  # x_{t+1+step} at index t
            here = positions + step
            keys = torch.cat([positions + earlier for earlier in range(step + 1)], dim=-1)
            mask = own_lm.mask_of(self.decoder, torch.cat([behind, *[itself] * step], dim=-1), here, keys)
            embeds = self.embed(after, here, target)
            hidden, *earlier = self.stretch(self.unrolled, embeds, hidden, here, mask, *earlier)
            flat = marked(own)
            depths.append(Depth(flat, hidden.flatten(0, 1)[flat], target.logits, ahead=1 + step))
        return depths

    def unrolled(self, embeds: Tensor, hidden: Tensor, positions: Tensor, mask: Any, *earlier: Tensor) -> tuple[Tensor, ...]:
        """One step of all rows [batch, rows, hidden] behind the keys and values of the ``earlier`` ones: its normed output,
        and the keys and values with its own."""
        cache = DynamicCache()
        if earlier:
            cache.update(earlier[0], earlier[1], 0)
        hidden = own_lm.hidden(self.decoder, self.enter(embeds, hidden), positions, mask, cache)
        layer: Any = cache.layers[0]
        return hidden, layer.keys, layer.values

    # -- drafting ----------------------------------------------------------------------------------------------

    def new_state(self) -> MtpState:
        return MtpState()

    def begin(self, state: MtpState, features: Features, ids: Tensor, target: Target) -> Guess:
        state.forget_drafts()
        positions = state.following(ids[1:])
        entered = self.enter(self.embed(ids[1:], positions[0], target), self.read(features))
        states = own_lm.hidden(self.decoder, entered[None], positions, cache=state.cache)[0, -1:]
        state.committed += len(entered)
        state.fed = {0: states}
        return Guess(target.logits(states), states)

    def deepen(self, state: MtpState, nodes: list[int], tokens: Tensor, shape: Shape, target: Target) -> Guess:
        before = torch.cat([state.fed[shape.parents[node - 1]] for node in nodes])
        states = own_lm.read_nodes(self.decoder, state, nodes, self.enter(target.embed(tokens), before), shape)
        state.fed |= {node: states[i : i + 1] for i, node in enumerate(nodes)}
        return Guess(target.logits(states), states)


def last_layer(target: Target) -> int:
    """The target's last layer of the kind that a module of its family has: full attention where it has any."""
    kinds = getattr(target.config, "layer_types", None) or ["full_attention"] * target.depth
    kind = (getattr(target.config, "mtp_layer_types", None) or ["full_attention"])[0]
    return max((i for i, each in enumerate(kinds) if each == kind), default=target.depth - 1)


def build(layer: dict[str, Any]) -> Any:
    """A one-layer decoder of a family in float32, without its embedding.

    Raises UserError for a family that transformers cannot build alone, or whose layers cannot draft.
    """
    try:
        config = AutoConfig.for_model(**layer)
        decoder = AutoModel.from_config(config, dtype=torch.float32)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"transformers builds no layer of a {layer.get('model_type')} model by itself ({first_line(error)}): "
            "train an eagle3 head for this target."
        ) from error
    odd = attention_kinds(config) - {"full_attention", "sliding_attention"}
    if odd or not hasattr(decoder, "norm") or not hasattr(decoder, "layers"):
        what = f"layers of kind {min(odd)} alone" if odd else "no layers and norm behind them that could be a module's"
        raise UserError(f"a {layer.get('model_type')} model has {what}: train an eagle3 head for this target.")
    decoder.set_input_embeddings(nn.Identity())
    return decoder


def module_of(target: Target, form: str, layer: dict[str, Any]) -> dict[str, Tensor]:
    """The module that the target's checkpoint carries, under the head's names."""
    directory = weights.directory_of(target.name)
    names = weights.places(directory)
    found = find(names, target.depth)
    if found != form:
        mend = "set head.options.init to target" if found is None else f"set head.options.form to {found}"
        raise UserError(f"{directory} carries {'no module' if found is None else f'a {found} module'}: {mend}.")
    tensors = weights.read(directory, FORMS[form].own(names, target.depth))
    return to_ours(tensors, build(layer), FORMS[form], target.depth)
