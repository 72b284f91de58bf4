"""What can be named as a proposer: a head's directory, any small LM of the target's tokenizer, or a look-up."""

from collections.abc import Callable
from pathlib import Path

import torch

from ..errors import UserError
from ..heads.base import DraftHead, check_target, read_config
from ..heads.draft_model import DraftModelHead
from ..heads.kinds import load_head
from ..heads.own_lm import OwnOptions
from ..target import Target
from .lookahead import Lookahead
from .ngram import NGram
from .proposers import Proposer
from .suffix import Suffix

# every look-up reads its settings, what stands behind the colon
LOOKUPS: dict[str, Callable[[str], Proposer]] = {"ngram": NGram.read, "suffix": Suffix.read, "lookahead": Lookahead.read}
MODEL = "model:"


def read_lookup(text: str) -> Proposer | None:
    """The look-up that ``text`` names, such as ``ngram`` or ``ngram:5,max=4``; None where it names none."""
    name, _, settings = text.partition(":")
    return LOOKUPS[name](settings) if name in LOOKUPS else None


def read_head(text: str, target: Target, force: bool = False) -> DraftHead:
    """The head in a directory, or ``model:`` and an LM of the target's tokenizer as it is, in no need of training.

    ``force`` allows a head of another target of the same sizes. Raises UserError for what is neither.
    """
    if text.startswith(MODEL):
        options = OwnOptions(model=text.removeprefix(MODEL))
        return DraftModelHead.create(target, options, None, 1, torch.arange(target.vocab_size)).to(target.device).eval()
    if not Path(text).is_dir():
        raise UserError(
            f"{text!r} is no proposer: name a head's directory, {MODEL}DIR for a small LM, or one of {', '.join(LOOKUPS)}."
        )
    check_target(read_config(text), target, force)
    return load_head(text).to(target.device)
