"""TensorRT-LLM's TensorRT backend, which later releases dropped: the inputs of its convert_checkpoint.py scripts."""

from ..layouts import medusa, redrafter
from .engine import Engine

ENGINE = Engine(
    version="1.2.1",
    layouts={
        "medusa": medusa.TENSORRT_LLM,
        "redrafter": redrafter.DRAFTER,
    },
    others="its converters read medusa and redrafter heads alone",
)
