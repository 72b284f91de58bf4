"""transformers' own generate(assistant_model=...), which takes causal LMs alone."""

from ..layouts import dflash, draft_model
from .engine import Engine

ENGINE = Engine(
    version="5.24.0",
    layouts={
        "dflash": dflash.TRANSFORMERS,
        "draft_model": draft_model.TRANSFORMERS,
    },
    others="generate(assistant_model=...) drafts with a causal LM alone",
)
