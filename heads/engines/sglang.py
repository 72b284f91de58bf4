"""SGLang's directories, where they are not the same as vLLM's."""

from ..layouts import dflash, draft_model, eagle, eagle3, mtp
from .engine import Engine

ENGINE = Engine(
    version="0.5.23",
    layouts={
        "dflash": dflash.SGLANG,
        "draft_model": draft_model.SGLANG,
        "eagle": eagle.SGLANG,
        "eagle3": eagle3.SGLANG,
        "mtp": mtp.SGLANG,
    },
    others="it loads no head of this kind, or loads vLLM's directory of it",
)
