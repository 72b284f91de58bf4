"""An independent causal LM as a draft: a small sibling of the target, or the first layers of the target itself.

It shares the target's tokenizer and vocabulary and nothing else: its embedding, layers, norm and output head are its own.
"""

import copy
import json
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from ..console import note
from ..errors import UserError, first_line
from ..fetch import load_tokenizer, located
from ..target import PROBE, UNREADABLE, Target, attention_kinds, attention_mask, read_out
from .base import HeadConfig, Shape
from .recurrent import seen_by

PRUNED = 8  # how many times fewer layers a self-draft has than its target, where the recipe does not say
# what a config says of its file, of how it is called and of other tasks
UNKEPT = (
    "_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "chunk_size_feed_forward", "id2label",
    "label2id", "output_attentions", "output_hidden_states", "problem_type", "return_dict",
)  # fmt: skip
ROUNDING = 1e-3  # of the states' size


class OwnOptions(BaseModel):
    """``model``: a directory, hub id or .gguf file of a causal LM; null: the target's own first layers, a self-draft.
    ``layers``: how many decoder layers are kept; null: all of ``model``'s, an eighth of the target's. ``lora``: the rank of
    peft's adapters on every linear layer; null: all weights are trained."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    layers: int | None = Field(default=None, ge=1)
    lora: int | None = Field(default=None, ge=1)


# -- which LM --------------------------------------------------------------------------------------------------


def plan(target: Target, options: OwnOptions) -> dict[str, Any]:
    """The transformers config of the LM that ``options`` name, with the target's vocabulary. Reads no weights.

    Raises UserError for an LM that cannot draft for the target: another tokenizer, too few rows or layers.
    """
    config = copy.deepcopy(target.config if options.model is None else sibling(target, options.model))
    depth: int = config.num_hidden_layers
    layers = options.layers or (depth if options.model else max(1, depth // PRUNED))
    if layers > depth:
        raise UserError(f"head.options.layers is {layers}, but {options.model or target.name} has {depth} layers: lower it.")
    for name, value in list(vars(config).items()):
        if "layer" in name and isinstance(value, list) and len(value) == depth:  # one entry a layer: its kind, its RoPE, …
            setattr(config, name, value[:layers])
    config.num_hidden_layers = layers
    config.vocab_size = target.vocab_size
    if options.model is None:  # a part of a larger model may leave it to the whole to say
        config.tie_word_embeddings = target.output_head.weight is target.embed.get_parameter("weight")
    return plain(config)


def plain(config: Any) -> dict[str, Any]:
    """A transformers config as JSON gives it back, without what is not the model's."""
    found = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in found.items() if key not in UNKEPT}


def sibling(target: Target, model: str) -> Any:
    """The config of the causal LM that ``model`` names; UserError unless it reads and writes the target's tokens."""
    path, where = located(model)
    try:
        config = AutoConfig.from_pretrained(path, **where).get_text_config()
        theirs = None if target.tokenizer is None else load_tokenizer(path, **where)
    except UNREADABLE as error:
        raise UserError(
            f"head.options.model: {model!r} cannot be read ({first_line(error)}): give a causal LM's directory."
        ) from error
    if getattr(config, "quantization_config", None):
        raise UserError(f"head.options.model: {model!r} is quantized and cannot be trained: give its unquantized weights.")
    if theirs is not None:
        compare_tokenizers(target, theirs, model)
    check_rows(target, config.vocab_size, model)
    longest = getattr(config, "max_position_embeddings", None) or target.max_positions
    if longest < target.max_positions:
        note(f"{model} was made for {longest} tokens, {target.name} for {target.max_positions}: expect less behind the former")
    return config


def check_rows(target: Target, rows: int, name: str) -> None:
    """UserError for an LM without an embedding row for every token of the target's tokenizer."""
    used = target.vocab_size
    if target.tokenizer is not None:  # rows behind its last token pad the embedding
        used = min(used, max(target.tokenizer.get_vocab().values()) + 1)
    if rows < used:
        raise UserError(f"{name!r} has {rows} embedding rows, but {target.name!r} has {used} tokens: choose an LM with more.")


def compare_tokenizers(target: Target, theirs: Any, model: str) -> None:
    """UserError where another tokenizer does not give the target's ids, with the first difference.

    Which of the common special tokens a tokenizer names as its end or padding does not matter: a base model drafts for its
    instruct sibling.
    """
    ours = target.tokenizer
    a, b = ours.get_vocab(), theirs.get_vocab()
    differing = [token for token in a.keys() | b.keys() if a.get(token) != b.get(token)]
    if differing:
        token = min(differing, key=lambda token: (a.get(token, b.get(token)), token))
        difference = f"{token!r} is token {a.get(token)} of the target and {b.get(token)} of the draft"
        raise UserError(refusal(target, model, difference))
    a, b = ({id: str(token) for id, token in each.added_tokens_decoder.items() if token.special} for each in (ours, theirs))
    differing = sorted(id for id in a.keys() | b.keys() if a.get(id) != b.get(id))
    if differing:
        difference = f"token {differing[0]} is special in only one of them"
        raise UserError(refusal(target, model, difference))
    a, b = (each(PROBE, add_special_tokens=False)["input_ids"] for each in (ours, theirs))
    if a != b:
        first = next(i for i in range(max(len(a), len(b))) if a[: i + 1] != b[: i + 1])
        split = [each.convert_ids_to_tokens(ids[first : first + 3]) for each, ids in ((ours, a), (theirs, b))]
        raise UserError(refusal(target, model, f"where the target splits {split[0]}, the draft splits {split[1]}"))


def refusal(target: Target, model: str, difference: str) -> str:
    return (
        f"head.options.model: {model!r} has another tokenizer than {target.name!r} ({difference}): a draft must write the "
        "target's tokens, so choose an LM of its family."
    )


# -- building and filling --------------------------------------------------------------------------------------


def build(config: HeadConfig, options: OwnOptions) -> Any:
    """The LM of a head's config in float32, its weights still random, inside peft's adapters where they are asked for."""
    if config.draft_vocab_size != config.target.vocab_size:
        raise UserError(f"a {config.kind} head writes the target's whole vocabulary: set head.draft_vocab to null.")
    try:
        lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.layer), dtype=torch.float32)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"the {config.kind} head's config tells of no causal LM that transformers knows: {first_line(error)}."
        ) from error
    return lm if options.lora is None else adapted(lm, options.lora, config.layer.get("pard_token"))


def adapted(lm: PreTrainedModel, rank: int, token: int | None) -> Any:
    """The LM with LoRA on its linear layers; the embedding of ``token`` is trained, too."""
    from peft import LoraConfig, get_peft_model  # takes seconds to import

    rows = None if token is None else [token]
    return get_peft_model(
        lm, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", trainable_token_indices=rows)
    )


def width(config: HeadConfig) -> int:
    """The size of the LM's hidden states."""
    return AutoConfig.for_model(**config.layer).hidden_size


def bare(lm: Any) -> Any:
    """The causal LM itself; adapters stay at work inside it."""
    return lm if isinstance(lm, PreTrainedModel) else lm.get_base_model()


def merged(head: Any) -> Any:
    """The head of an own LM with its adapters merged into the weights; itself where it has none."""
    if head.options.lora is None:
        return head
    found = copy.deepcopy(head)
    found.lm = found.lm.merge_and_unload().requires_grad_(True)
    found.options = head.options.model_copy(update={"lora": None})
    found.config = head.config.model_copy(update={"options": found.options.model_dump()})
    return found


def filled(config: HeadConfig, options: OwnOptions, target: Target) -> Any:
    """``build`` with the weights of the LM that ``options`` name."""
    name = options.model or target.name
    lm = build(config, options.model_copy(update={"lora": None}))
    source = target.model if options.model is None else load(options.model)
    held = target.weights_of(source, lm.state_dict()) if options.model is None else source.state_dict()
    copy_weights(held, source.config.get_text_config().vocab_size, lm, name)
    refuse_unmaskable(lm, name)
    return lm if options.lora is None else adapted(lm, options.lora, config.layer.get("pard_token"))


@torch.no_grad()
def copy_weights(theirs: dict[str, Tensor], rows: int, lm: PreTrainedModel, name: str) -> None:
    """Copy a model's tensors into an LM of its first layers; UserError where one is missing.

    Embedding rows beyond the LM's vocabulary are left out; those beyond the model's ``rows``, which no text uses, repeat its
    last.
    """
    wanted = lm.config.vocab_size
    for key, tensor in lm.state_dict().items():
        found = theirs.get(key)
        if found is not None and found.shape[:1] == (rows,) and tensor.shape[:1] == (wanted,):
            found = found[torch.arange(wanted).clamp_max(rows - 1).to(found.device)] if rows != wanted else found
        if found is None or found.shape != tensor.shape:
            raise UserError(f"{name!r} has no fitting tensor {key!r} for a causal LM of its first layers: give another model.")
        tensor.copy_(found)


def from_tensors(layer: dict[str, Any], tensors: dict[str, Tensor]) -> PreTrainedModel:
    """The causal LM of a checkpoint's config and tensors, under the names that the library stores it by, in their dtype.

    Raises UserError for a tensor that is missing, has another shape or has no place.
    """
    config = AutoConfig.for_model(**layer)
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    lm, found = kind.from_pretrained(
        None,
        config=config,
        state_dict=dict(tensors),
        dtype=dtypes.pop() if len(dtypes) == 1 else torch.float32,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    for key, given, asked in sorted(found["mismatched_keys"]):
        raise UserError(f"the checkpoint's tensor {key!r} has shape {list(given)}, and its config.json asks for {list(asked)}.")
    for what, keys in (("lacks", found["missing_keys"]), ("has no place for", found["unexpected_keys"])):
        if keys:
            raise UserError(f"the checkpoint {what} the tensor {min(keys)!r}, by its config.json: fetch it again.")
    return lm


def load(model: str) -> PreTrainedModel:
    path, where = located(model)
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **where)
    except UNREADABLE as error:
        raise UserError(
            f"head.options.model: {model!r} cannot be loaded ({first_line(error)}): give a causal LM's directory."
        ) from error


@torch.no_grad()
def refuse_unmaskable(lm: PreTrainedModel, name: str) -> None:
    """UserError for an LM that a mask and positions alone do not tell what a token reads: one with a recurrent state, say.

    Seven tokens that are laid out in reverse must give the states that they give in order.
    """
    odd = attention_kinds(lm.config) - {"full_attention", "sliding_attention"}
    ids, positions = torch.arange(7)[None] % lm.config.vocab_size, torch.arange(7)[None].flip(1)
    lm.eval()
    try:
        seen = positions[:, None] <= positions[:, :, None]
        turned = hidden(lm, ids.flip(1), positions, mask_of(lm, seen, positions, positions)).flip(1)
        plain = hidden(lm, ids, positions.flip(1))
        obeys = not odd and bool((turned - plain).norm() < ROUNDING * plain.norm())
    except (ValueError, TypeError, RuntimeError, IndexError):  # it takes no such mask, or no positions
        obeys = False
    lm.train()
    if not obeys:
        what = f"layers of kind {min(odd)}" if odd else "layers that read past a mask"
        raise UserError(f"{name} has {what}, with which no tree can be drafted: choose an LM with full or sliding attention.")


# -- running ---------------------------------------------------------------------------------------------------


def hidden(lm: Any, entered: Tensor, positions: Tensor | None, mask: Any = None, cache: DynamicCache | None = None) -> Tensor:
    """The LM's last hidden states [batch, rows, width], after its final norm, of ids or embeddings."""
    given = {"inputs_embeds" if entered.is_floating_point() else "input_ids": entered}
    decoder = bare(lm).base_model
    return decoder(**given, position_ids=positions, attention_mask=mask, cache=cache, use_cache=cache is not None)[0]


def recompute(lm: Any) -> None:
    """From now on the LM's layers are computed again for the backward pass; UserError for an LM that cannot."""
    own = bare(lm)
    if not own.supports_gradient_checkpointing:
        raise UserError(
            f"transformers has no gradient checkpointing for a {own.config.model_type} model: set "
            "train.gradient_checkpointing to false."
        )
    own.activation_checkpointing_enable({"use_reentrant": False})


def logits(lm: Any, states: Tensor) -> Tensor:
    """Logits [..., vocab] of last hidden states [..., width], by the LM's own code."""
    own = bare(lm)
    return read_out(own, states.to(own.dtype), states.device)


def mask_of(lm: Any, seen: Tensor, positions: Tensor, key_positions: Tensor) -> Any:
    """What ``hidden`` takes as the mask for ``seen`` [batch, rows, keys]; see ``target.attention_mask``."""
    own = bare(lm)
    return attention_mask(own.config, seen, positions, key_positions, own.dtype)


@dataclass
class OwnState:
    """The LM's keys and values of the committed tokens, then of the nodes drafted in this round, in the order of ``slots``."""

    cache: DynamicCache = field(default_factory=DynamicCache)
    committed: int = 0
    slots: list[int] = field(default_factory=list)

    def forget_drafts(self) -> None:
        self.cache.crop(-len(self.slots))
        self.slots = []

    def unread(self, ids: Tensor) -> Tensor:
        """Those of the tokens that ``DraftHead.begin`` is given which the LM has not read: the first row's own is new once."""
        return ids[1:] if self.committed else ids

    def following(self, tokens: Tensor) -> Tensor:
        """The positions [1, rows] of tokens [rows, ...] in a chain behind the committed ones."""
        return torch.arange(self.committed, self.committed + len(tokens), device=tokens.device)[None]


def read_nodes(lm: Any, state: OwnState, nodes: list[int], tokens: Tensor, shape: Shape) -> Tensor:
    """Read the drafted ``tokens`` [n] of ``nodes``, each behind the committed tokens and its own ancestors: [n, width]."""
    state.slots += nodes
    seen = seen_by(nodes, state.slots, shape, state.committed, tokens.device)
    depths = torch.tensor(shape.depths, device=tokens.device)
    keys = torch.cat([torch.arange(state.committed, device=tokens.device), state.committed - 1 + depths[state.slots]])[None]
    positions = keys[:, -len(nodes) :]
    return hidden(lm, tokens[None], positions, mask_of(lm, seen[None], positions, keys), state.cache)[0]
