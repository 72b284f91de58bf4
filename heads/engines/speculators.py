"""The speculators format, which vLLM serves as it is."""

from ..layouts import dflash, eagle3, mtp, peagle
from .engine import Engine

ENGINE = Engine(
    version="0.9.0",
    layouts={
        "dflash": dflash.SPECULATORS_FORMAT,
        "eagle3": eagle3.SPECULATORS,
        "mtp": mtp.IN_SPECULATORS,
        "peagle": peagle.SPECULATORS,
    },
    others="the speculators format that vLLM reads knows eagle3, peagle, dflash, dflash2 and dspark only",
)
