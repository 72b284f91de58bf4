"""The directories that llama.cpp's convert_hf_to_gguf.py takes, with --target-model-dir."""

from ..layouts import dflash, draft_model, eagle3
from .engine import Engine

ENGINE = Engine(
    version="0c1e57098",
    layouts={
        "dflash": dflash.LLAMACPP,
        "draft_model": draft_model.LLAMA_CPP,
        "eagle3": eagle3.LLAMACPP,
    },
    others="it converts no head of this kind, or converts vLLM's directory of it",
)
