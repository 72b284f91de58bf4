"""The directories that llama.cpp's convert_hf_to_gguf.py takes, with --target-model-dir."""

from ..layouts import dflash, draft_model
from .engine import Engine

ENGINE = Engine(
    version="0c1e57098",
    layouts={
        "dflash": dflash.LLAMACPP,
        "draft_model": draft_model.LLAMA_CPP,
    },
    others="it converts no head of this kind, or converts vLLM's directory of it",
)
