"""transformers' own generate: with an assistant_model, or with use_mtp for a target that carries a module."""

from ..layouts import dflash, draft_model, mtp
from .engine import Engine

ENGINE = Engine(
    version="5.24.0",
    layouts={
        "dflash": dflash.TRANSFORMERS,
        "draft_model": draft_model.TRANSFORMERS,
        "mtp": mtp.TRANSFORMERS,
    },
    others="its generate drafts with another causal LM or with a target's own module",
)
