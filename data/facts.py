"""What a target is, read from its config and tokenizer alone: no weights are loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from transformers import AutoConfig, GenerationConfig

from ..errors import UserError
from ..fetch import hub_reachable, load_tokenizer, local_path
from ..target import UNREADABLE


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
        path = local_path(name)
        where: dict[str, Any] = {"local_files_only": not Path(path).exists() and not hub_reachable()}  # or it tries for long
        if path.endswith(".gguf"):
            where["gguf_file"] = Path(path).name
            path = str(Path(path).parent)
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
            _eos_ids(_generation_config(path, where["local_files_only"]), config, tokenizer),
        )


def _generation_config(path: str, local_files_only: bool) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(path, local_files_only=local_files_only)
    except UNREADABLE:
        return None


def _eos_ids(*places: Any) -> frozenset[int]:
    """From the first of the places that names any, as transformers' generate takes them."""
    for place in places:
        ids = getattr(place, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
