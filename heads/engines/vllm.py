"""vLLM's own directories. The EAGLE-3 one is also what SGLang and TensorRT-LLM's PyTorch backend load."""

from ..layouts import dflash, draft_model, eagle, eagle3, medusa, mtp, pard, peagle
from .engine import Engine

ENGINE = Engine(
    version="0.32.0",
    layouts={
        "dflash": dflash.VLLM,
        "draft_model": draft_model.VLLM,
        "eagle": eagle.VLLM,
        "eagle3": eagle3.PLAIN,
        "medusa": medusa.VLLM,
        "mtp": mtp.VLLM,
        "pard": pard.VLLM,
        "peagle": peagle.PLAIN,
    },
    others="it loads no head of this kind",
)

MERGED = Engine(
    version="0.32.0",
    layouts={
        "medusa": medusa.VLLM_MERGED,
    },
    others="it is for heads that train an adapter on their target, to be served with a target that has it merged in",
)
