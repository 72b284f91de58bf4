"""The frozen target model: load, embed, tap hidden states, apply the output head, verify a tree of drafts."""

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutputWithPast

from .errors import UserError, first_line
from .fetch import load_tokenizer, located

# text on which tokenizers of one vocabulary part ways when they split differently
PROBE = "In 2024,\n\n1. it's  12345 a-b\tC++ _x_ naïve Straße 你好 🙂\r\n   def f(x):\n\n\n        return x[0]+1.5e-3\n"
DTYPES = ("auto", "float32", "bfloat16", "float16")
MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # the library's words for spreading over devices
UNREADABLE = (OSError, ValueError, KeyError, IndexError, ImportError, struct.error, SafetensorError)


@dataclass
class Features:
    """What a head reads of the target, for rows that follow one another.

    ``taps`` [..., n_taps * hidden]: residual-stream states after the tapped layers, low to high, before any final norm.
    ``last`` [..., hidden]: the last hidden state, after the final norm: what the output head reads.
    """

    taps: Tensor
    last: Tensor

    def rows(self, index: Any) -> "Features":
        return Features(self.taps[index], self.last[index])


class Answer(BaseModelOutputWithPast):
    """A decoder's output with nothing but the last hidden state: what else a model asks for (router logits, …) is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Target:
    """Any Hugging Face causal LM, frozen. Its parts are found through the library's own interface, never by name.

    A tap ``k`` is the hidden state after ``k`` decoder layers: transformers' ``hidden_states[k]``, vLLM's
    ``eagle_aux_hidden_state_layer_ids``. Tap 0 is the embedding output; tap ``depth`` is read before the final norm.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str) -> None:
        self.model: Any = model.eval().requires_grad_(False)
        self.tokenizer: Any = tokenizer
        self.name = name
        self.config: Any = model.config.get_text_config()
        self.decoder: Any = model.base_model
        self.depth: int = self.config.num_hidden_layers
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.config.vocab_size
        self.max_positions: int = getattr(self.config, "max_position_embeddings", None) or 2**31
        self.embed: nn.Module = model.get_input_embeddings()
        self.output_head: Any = model.get_output_embeddings()
        self._few: tuple[Tensor, nn.Linear] | None = None  # the tokens that ``logits`` was last asked for, and their rows
        self.device: torch.device = next(self.embed.parameters()).device
        self.dtype: torch.dtype = model.dtype
        self.layers = self._find_layers()
        self.final_norm = self._find_final_norm()
        self.eos_ids = eos_ids(model.generation_config, self.config, tokenizer)

    @classmethod
    def load(cls, name: str, dtype: str = "auto", device: str | dict | None = None) -> Self:
        """Load a model directory, a hub id or a ``.gguf`` file with its tokenizer.

        ``dtype``: "auto", "float32", "bfloat16" or "float16". ``device``: a device ("cpu", "cuda:0") or a transformers
        device map ("auto", or a dict of modules). Raises UserError when nothing can be loaded from ``name``.
        """
        if dtype not in DTYPES:
            raise UserError(f"dtype {dtype!r} is none that a target has: choose {', '.join(DTYPES)}.")
        if isinstance(device, str) and device not in MAPS:
            try:
                torch.device(device)
            except RuntimeError as error:
                raise UserError(f"device {device!r} is none: give cpu, cuda:0 or another device, or auto.") from error
        path, where = located(name)
        try:
            tokenizer = load_tokenizer(path, **where)
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map=device, **where)
        except UNREADABLE as error:
            raise UserError(
                f"target {name!r} cannot be loaded ({first_line(error)}): give a model directory, a hub id or a .gguf file."
            ) from error
        if "gguf_file" in where:
            forget_quantization(model)
        return cls(model, tokenizer, name)

    # -- what the target is ------------------------------------------------------------------------------------

    def _find_layers(self) -> nn.ModuleList:
        for module in self.decoder.modules():
            if isinstance(module, nn.ModuleList) and len(module) == self.depth:
                return module
        raise UserError(f"target {self.name!r} has no list of {self.depth} decoder layers: draftsmith cannot tap it.")

    @torch.no_grad()
    def _find_final_norm(self) -> nn.Module | None:
        """The module outside the layers whose output is the last hidden state; None where the model has no such norm."""
        inside = {id(m) for m in self.layers.modules()} | {id(m) for m in self.embed.modules()} | {id(self.decoder)}
        outputs: list[tuple[nn.Module, int]] = []

        def remember(module: nn.Module, _: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                outputs.append((module, output.data_ptr()))

        hooks = [m.register_forward_hook(remember) for m in self.decoder.modules() if id(m) not in inside]
        last = self.decoder(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.device), use_cache=False)[0]
        for hook in hooks:
            hook.remove()
        return next((module for module, pointer in reversed(outputs) if pointer == last.data_ptr()), None)

    @property
    def fingerprint(self) -> str:
        """A digest of architecture, tokenizer (vocabulary and splitting) and chat template: what a head must agree with."""
        ignored = {"_name_or_path", "dtype", "torch_dtype", "transformers_version", "quantization_config", "architectures"}
        config = {k: v for k, v in self.config.to_dict().items() if k not in ignored}
        digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
        if self.tokenizer is not None:
            digest.update(json.dumps(sorted(self.tokenizer.get_vocab().items())).encode())
            digest.update(str(self.tokenizer.chat_template).encode())
            digest.update(json.dumps(self.tokenizer(PROBE, add_special_tokens=False)["input_ids"]).encode())
        return digest.hexdigest()[:16]

    def tokenizer_or_refuse(self) -> Any:
        """The tokenizer; UserError where it is missing or has no chat template."""
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise UserError(f"the tokenizer of {self.name!r} has no chat template: set tokenizer.chat_template and save it.")
        return self.tokenizer

    def weights_of(self, module: nn.Module, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The tensors of one of the model's modules by their names in it: all of them, or those of ``names`` that it has.

        Processes that hold the target together all call this: what is sharded is gathered.
        """
        held = module.state_dict()
        return {name: whole(held[name]) for name in (held if names is None else names) if name in held}

    def check_taps(self, taps: Sequence[int]) -> None:
        """Raise UserError unless the taps are distinct, sorted and within 0..depth."""
        for tap in taps:
            if not 0 <= tap <= self.depth:
                raise UserError(
                    f"tap {tap} is outside the target: {self.name!r} has {self.depth} layers, so taps run from 0 to "
                    f"{self.depth}."
                )
        if list(taps) != sorted(set(taps)):
            raise UserError(f"taps {list(taps)} must be distinct and rising: write {sorted(set(taps))}.")

    # -- what the target computes ------------------------------------------------------------------------------

    @contextmanager
    def _watch(self, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Collect the inputs of the tapped layers, and under -1 the last hidden state, of forwards run inside."""
        seen: dict[int, Tensor] = {}

        def watch_input(key: int) -> Any:
            def hook(_: nn.Module, args: tuple, kwargs: dict) -> None:
                seen[key] = args[0] if args else kwargs["hidden_states"]

            return hook

        def watch_output(_: nn.Module, __: tuple, output: Any) -> None:
            seen[-1] = output[0]

        hooks = [self.decoder.register_forward_hook(watch_output)]
        for tap in taps:
            module = self.layers[tap] if tap < self.depth else self.final_norm
            if module is not None:
                hooks.append(module.register_forward_pre_hook(watch_input(tap), with_kwargs=True))
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    def _features(self, seen: dict[int, Tensor], taps: Sequence[int]) -> Features:
        last = seen[-1].to(self.device)
        tapped = [seen.get(tap, last).to(self.device) for tap in taps]
        return Features(torch.cat(tapped, dim=-1) if tapped else last[..., :0], last)

    @torch.no_grad()
    def features(self, ids: Tensor, taps: Sequence[int], positions: Tensor | None = None) -> Features:
        """Run right-padded ids [batch, time] through the decoder; the output head is not run.

        ``positions`` [batch, time] restart at 0 with each sequence packed into a row, and no sequence sees another (the
        library reads that from the positions); None: one sequence a row.

        Returns taps [batch, time, n_taps * hidden] and last [batch, time, hidden]. Rows beyond a sequence's own length
        are garbage: with causal attention and padding on the right they never reach a real row.
        """
        return self.run(ids, taps, positions)

    def run(self, ids: Tensor, taps: Sequence[int], positions: Tensor | None = None) -> Features:
        """As ``features``, with gradients for what is trained inside the model."""
        with self._watch(taps) as seen:
            where = {} if positions is None else {"position_ids": positions.to(self.device)}
            self.decoder(input_ids=ids.to(self.device), use_cache=False, **where)
        return self._features(seen, taps)

    def keeps_packed_apart(self) -> bool:
        """Whether sequences packed into one row give the states that each gives alone, to a tenth of their size."""
        first, second = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[5, 6, 7]])
        together = self.features(torch.cat([first, second], 1), (), torch.tensor([[0, 1, 2, 3, 0, 1, 2]])).last
        alone = self.features(second, ()).last
        return bool((together[:, 4:] - alone).norm() < 0.1 * alone.norm())

    def logits(self, last: Tensor, ids: Tensor | None = None) -> Tensor:
        """Logits [..., V] of last hidden states [..., hidden], by the model's own code: scales and soft caps included.
        Gradients flow to ``last``. ``ids`` [n]: of these tokens alone [..., n], the output head's other rows not being read.
        """
        last = last.to(self.dtype)
        if ids is None or len(ids) == self.vocab_size:
            return read_out(self.model, last, self.device)
        if type(self.output_head) is not nn.Linear:  # quantized, or adapted
            return read_out(self.model, last, self.device)[..., ids]
        if self._few is None or self._few[0] is not ids:
            self._few = ids, few_rows(self.output_head, ids)
        self.model.set_output_embeddings(self._few[1])
        try:
            return read_out(self.model, last, self.device)
        finally:
            self.model.set_output_embeddings(self.output_head)

    def new_cache(self) -> DynamicCache:
        """A cache whose layers all keep every row, so that rejected rows can be dropped (sliding windows included).

        Raises UserError for layers that keep another state than keys and values: it cannot be rolled back.
        """
        odd = attention_kinds(self.config) - {"full_attention", "sliding_attention"}
        if odd:
            raise UserError(
                f"target {self.name!r} has layers of kind {min(odd)}, whose state cannot drop rejected drafts: "
                "choose a target with full or sliding attention alone."
            )
        return DynamicCache()

    @torch.no_grad()
    def prefill(self, ids: Tensor, cache: DynamicCache, taps: Sequence[int]) -> tuple[Tensor, Features]:
        """Read the prompt ids [time] into the cache. Returns the last row's logits [V] and every row's features."""
        with self._watch(taps) as seen:
            logits = self.model(input_ids=ids[None], cache=cache, use_cache=True, logits_to_keep=1).logits
        return logits[0, -1], self._features({k: v[0] for k, v in seen.items()}, taps)

    @torch.no_grad()
    def verify(
        self,
        tokens: Tensor,
        positions: Tensor,
        ancestry: Tensor,
        lengths: Sequence[int],
        cache: DynamicCache,
        taps: Sequence[int],
    ) -> tuple[Tensor, Features]:
        """One pass over token trees [batch, nodes], each behind the cached prefix of its own sequence; node 0 is the root.

        ``positions`` [batch, nodes] are absolute, ``ancestry`` bool [batch, nodes, nodes] is True where the column is the
        row's ancestor or itself, ``lengths`` are the sequences' cached rows. Adds every node's keys and values to the cache
        (see ``keep``). Returns logits [batch, nodes, V] and features [batch, nodes].
        """
        past = cache.get_seq_length()
        alone = tokens.shape[1] == 1 and min(lengths) == past
        mask = None if alone else self._attention_mask(ancestry, positions, lengths, past)
        with self._watch(taps) as seen:
            logits = self.model(
                input_ids=tokens, position_ids=positions, attention_mask=mask, cache=cache, use_cache=True
            ).logits
        return logits, self._features(seen, taps)

    def _attention_mask(self, ancestry: Tensor, positions: Tensor, lengths: Sequence[int], past: int) -> Any:
        """Every node sees the cached prefix of its sequence, its ancestors and itself."""
        slots = torch.arange(past, device=self.device)
        prefix = slots < torch.tensor(lengths, device=self.device)[:, None]
        seen = torch.cat([prefix[:, None].expand(-1, ancestry.shape[1], -1), ancestry], dim=2)
        keys = torch.cat([slots.expand(len(lengths), -1), positions], dim=1)
        return attention_mask(self.config, seen, positions, keys, self.dtype)

    @staticmethod
    def keep(cache: DynamicCache, lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Of the last verify pass keep the nodes of every sequence's path, in that order behind its ``lengths`` rows, and
        drop the others. Where sequences have come to differ in length, what lies behind the shorter ones is garbage.
        """
        past = max(lengths)
        moved = [
            (row, length + place, past + node)
            for row, (length, path) in enumerate(zip(lengths, paths, strict=True))
            for place, node in enumerate(path)
            if length + place != past + node
        ]
        width = max(length + len(path) for length, path in zip(lengths, paths, strict=True))
        if not moved and width == cache.get_seq_length():
            return
        rows, to, of = torch.tensor(moved, dtype=torch.long).reshape(-1, 3).unbind(1)
        for layer in cache.layers:
            for name in ("keys", "values"):
                held: Tensor = getattr(layer, name)
                if moved:
                    at = [index.to(held.device) for index in (rows, to, of)]
                    held[at[0], :, at[1]] = held[at[0], :, at[2]]
                setattr(layer, name, held[..., :width, :])

    @staticmethod
    def join(cache: DynamicCache | None, other: DynamicCache) -> DynamicCache:
        """The cache with the one sequence of ``other`` behind its own ones; what lies behind the shorter ones is garbage."""
        if cache is None:
            return other
        for layer, added in zip(cache.layers, other.layers, strict=True):
            for name in ("keys", "values"):
                pair: tuple[Tensor, Tensor] = getattr(layer, name), getattr(added, name)
                width = max(held.shape[2] for held in pair)
                padded = [torch.nn.functional.pad(held, (0, 0, 0, width - held.shape[2])) for held in pair]
                setattr(layer, name, torch.cat(padded))
        return cache

    @staticmethod
    def select(cache: DynamicCache, rows: Sequence[int], width: int) -> None:
        """Keep these sequences alone, and the first ``width`` rows, which is as long as the longest of them."""
        for layer in cache.layers:
            for name in ("keys", "values"):
                held: Tensor = getattr(layer, name)
                setattr(layer, name, held[list(rows), :, :width])


def whole(tensor: Tensor) -> Tensor:
    """A weight of a target that several processes may hold together, all of which call this: gathered where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def read_out(model: Any, last: Tensor, device: torch.device) -> Tensor:
    """Logits [..., V] of a causal LM from last hidden states [..., hidden] of its dtype.

    The causal LM's forward is run with its decoder answering ``last``, so nothing of the head is written twice.
    """
    rows, decoder = last.reshape(1, -1, last.shape[-1]), model.base_model
    answered = Answer(last_hidden_state=rows)  # type: ignore[arg-type]
    original = decoder.__dict__.get("forward")
    decoder.forward = lambda *_, **__: answered
    try:
        ids = torch.zeros(rows.shape[:2], dtype=torch.long, device=device)
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        if original is None:
            del decoder.forward
        else:
            decoder.forward = original
    return logits.reshape(*last.shape[:-1], logits.shape[-1])


def few_rows(head: nn.Linear, ids: Tensor) -> nn.Linear:
    """An output head of the tokens ``ids`` [n] alone."""
    with torch.device("meta"):
        few = nn.Linear(head.in_features, len(ids), bias=head.bias is not None)
    few.weight = nn.Parameter(head.weight[ids], requires_grad=False)
    if head.bias is not None:
        few.bias = nn.Parameter(head.bias[ids], requires_grad=False)
    return few


def attention_mask(config: Any, seen: Tensor, positions: Tensor, key_positions: Tensor, dtype: torch.dtype) -> Any:
    """The additive mask [batch, 1, rows, keys] of ``seen`` bool [batch, rows, keys]; a dict by layer kind where the model
    slides some windows.

    ``positions`` [batch, rows] and ``key_positions`` [batch, keys] tell how far apart a row and a key are.
    """
    lowest = torch.finfo(dtype).min
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, lowest)
    kinds = attention_kinds(config)
    if "sliding_attention" not in kinds:
        return mask[:, None]
    far = positions[:, :, None] - key_positions[:, None] >= config.sliding_window
    sliding = mask.masked_fill(far, lowest)
    if len(kinds) == 1:
        return sliding[:, None]
    return {"full_attention": mask[:, None], "sliding_attention": sliding[:, None]}


def attention_kinds(config: Any) -> set[str]:
    """The kinds of a model's layers; a config that lists none has one kind, sliding where it names a window."""
    window = getattr(config, "sliding_window", None)
    return set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])


def eos_ids(*places: Any) -> frozenset[int]:
    """The ids that end a text: as transformers' generate takes them, from the first of the places that names any."""
    for place in places:
        ids = getattr(place, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def forget_quantization(model: Any) -> None:
    """Make a model that was read from a GGUF file an ordinary one; its weights are plain floats already."""
    for owner, name in ((model.config, "quantization_config"), (model, "hf_quantizer"), (model, "quantization_method")):
        if hasattr(owner, name):
            delattr(owner, name)
    model.is_quantized = False
