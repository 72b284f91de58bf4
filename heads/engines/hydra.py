"""Hydra's own repository (zankner/Hydra), a research code for Llama targets."""

from ..layouts import hydra
from .engine import Engine

ENGINE = Engine(
    version="commit 3f39fbd",
    layouts={
        "hydra": hydra.REPOSITORY,
    },
    others="Hydra's repository runs hydra heads alone",
)
