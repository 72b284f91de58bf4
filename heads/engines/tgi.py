"""Text Generation Inference (in maintenance mode), which is started on the head's directory and finds the target through it."""

from ..layouts import medusa, mlp_speculator
from .engine import Engine

ENGINE = Engine(
    version="commit db931fcf",
    layouts={
        "medusa": medusa.TGI,
        "mlp_speculator": mlp_speculator.TGI,
    },
    others="it loads medusa heads and tied MLP speculators alone",
)
