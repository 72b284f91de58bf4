"""TensorRT-LLM's PyTorch backend, which loads directories as vLLM does.

It never reads from an EAGLE-3 config which layers are tapped: other taps than the default ones go into
Eagle3DecodingConfig(eagle3_layers_to_capture=...), and the exported config's draftsmith block holds that list.
"""

from ..layouts import dflash, draft_model, eagle3, pard
from .engine import Engine

ENGINE = Engine(
    version="main of November 2026",
    layouts={
        "dflash": dflash.TENSORRT_LLM,
        "draft_model": draft_model.TENSORRT_LLM,
        "eagle3": eagle3.TENSORRT_LLM,
        "pard": pard.TENSORRT_LLM,
    },
    others="it loads no head of this kind, or loads vLLM's directory of it",
)
