"""What a target is, read from its config and tokenizer alone: no weights are loaded."""

from dataclasses import dataclass
from typing import Any, Self

from transformers import AutoConfig

from ..ends import generation_config
from ..errors import UserError
from ..fetch import load_tokenizer, located
from ..target import UNREADABLE, eos_ids


@dataclass(frozen=True)
class TargetFacts:
    """``max_positions`` and ``eos_ids`` (the ids that end a text) are what ``Target`` finds once it is loaded."""

    name: str
    tokenizer: Any
    depth: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    eos_ids: frozenset[int]

    @classmethod
    def read(cls, name: str) -> Self:
        """Read a model directory, a hub id or a ``.gguf`` file. Raises UserError where config or tokenizer are not there."""
        path, where = located(name)
        try:
            tokenizer = load_tokenizer(path, **where)
            config = AutoConfig.from_pretrained(path, **where).get_text_config()
        except UNREADABLE as error:
            first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UserError(
                f"the config and tokenizer of target {name!r} cannot be read ({first_line}): give a model directory, a hub id "
                "or a .gguf file."
            ) from error
        return cls(
            name,
            tokenizer,
            config.num_hidden_layers,
            config.hidden_size,
            config.vocab_size,
            getattr(config, "max_position_embeddings", None) or 2**31,
            eos_ids(generation_config(path, where["local_files_only"]), config, tokenizer),
        )
