"""IBM's foundation-model-stack: fms-extras, and everything that reads its Hugging Face directories."""

from ..layouts import mlp_speculator
from .engine import Engine

ENGINE = Engine(
    version="commit 16339f7",
    layouts={
        "mlp_speculator": mlp_speculator.FMS,
    },
    others="fms-extras runs mlp_speculator heads alone",
)
