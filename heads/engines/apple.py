"""Apple's own ReDrafter code (apple/ml-recurrent-drafter), which serves Llama targets in PyTorch and MLX."""

from ..layouts import redrafter
from .engine import Engine

ENGINE = Engine(
    version="bd8586b",
    layouts={
        "redrafter": redrafter.DRAFTER,
    },
    others="it loads redrafter heads alone",
)
