"""The head kinds, one line each, and how a head directory becomes a head again."""

from pathlib import Path

from ..errors import UserError
from .base import DraftHead, read_config, read_weights
from .dflash import DFlashHead
from .draft_model import DraftModelHead
from .eagle import EagleHead
from .eagle3 import Eagle3Head
from .hydra import HydraHead
from .medusa import MedusaHead
from .mlp_speculator import MlpSpeculatorHead
from .mtp import MtpHead
from .pard import PardHead
from .peagle import PEagleHead
from .redrafter import RedrafterHead

KINDS: dict[str, type[DraftHead]] = {
    "dflash": DFlashHead,
    "draft_model": DraftModelHead,
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "hydra": HydraHead,
    "medusa": MedusaHead,
    "mlp_speculator": MlpSpeculatorHead,
    "mtp": MtpHead,
    "pard": PardHead,
    "peagle": PEagleHead,
    "redrafter": RedrafterHead,
}


def load_head(directory: str | Path) -> DraftHead:
    """The head that ``directory`` (config.json, model.safetensors) holds, in evaluation mode."""
    config = read_config(directory)
    if config.kind not in KINDS:
        raise UserError(f"{directory} holds a head of kind {config.kind!r}, and this draftsmith knows {', '.join(KINDS)}.")
    head = KINDS[config.kind](config)
    read_weights(head, directory)
    return head.eval()
