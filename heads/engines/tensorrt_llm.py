"""TensorRT-LLM's PyTorch backend, which loads directories as vLLM does."""

from ..layouts import dflash, draft_model, pard
from .engine import Engine

ENGINE = Engine(
    version="main of November 2026",
    layouts={
        "dflash": dflash.TENSORRT_LLM,
        "draft_model": draft_model.TENSORRT_LLM,
        "pard": pard.TENSORRT_LLM,
    },
    others="it loads no head of this kind, or loads vLLM's directory of it",
)
