"""How right a head's confidence is, and the temperatures that make it right."""

import torch
from torch import Tensor

from ..heads.confidence import Confidence

BINS, FAR = 320, 8.0  # fine bins of logits from -FAR to FAR, each 0.05 wide
COARSE = 15  # equal bins of confidence, as calibration errors are usually told
TEMPERATURES = torch.logspace(-3, 3, 121, base=2.0, dtype=torch.float64)  # 1/8 to 8, 1 among them


def calibration_error(sure: Tensor, temperature: Tensor | None = None) -> Tensor:
    """The expected calibration error of every depth [depths]: the mean gap between confidence and acceptance in 15 equal
    bins of confidence, bins weighted by their rows. 0 where there are no rows.

    ``sure`` [depths, BINS, 3]: sums as ``DepthSums.sure`` keeps them; each fine bin counts at its mean logit.
    """
    weight, logit, accepted = sure.unbind(-1)
    confidence = (mean_logit(weight, logit) / (1 if temperature is None else temperature.to(logit)[:, None])).sigmoid()
    coarse = (confidence * COARSE).long().clamp_max(COARSE - 1)
    gaps = torch.zeros(len(sure), COARSE, dtype=sure.dtype, device=sure.device)
    gaps.scatter_add_(1, coarse, weight * confidence - accepted)
    return gaps.abs().sum(1) / weight.sum(1).clamp_min(1e-12)


def mean_logit(weight: Tensor, logit: Tensor) -> Tensor:
    return torch.where(weight > 0, logit / weight.clamp_min(1e-30), 0)


def fitted_temperatures(sure: Tensor) -> Tensor:
    """Every depth's temperature [depths]: of 1/8 to 8 the one under which the confidence's log-likelihood is highest
    (temperature scaling: Guo et al., 1706.04599), 1 where nothing tells.

    DSpark fits one temperature per position, in the order of the positions, to the survival of whole prefixes. Rows here
    weigh the chance that their prefix survives, so each fit is to the conditional chance, and the product of calibrated
    chances is the survival's. DSpark's own criterion, the calibration error, is least for a confidence that always says
    the mean; the likelihood is not.
    """
    weight, logit, accepted = sure.unbind(-1)
    scaled = mean_logit(weight, logit)[:, None] / TEMPERATURES.to(logit.device)[:, None]  # [depths, temperatures, BINS]
    losses = weight[:, None] * torch.nn.functional.softplus(scaled) - accepted[:, None] * scaled
    nearest = TEMPERATURES.log().abs().argsort().to(logit.device)  # 1 first: of equals, the least change
    return TEMPERATURES.to(logit.device)[nearest[losses.sum(-1)[:, nearest].argmin(1)]]


def calibrate(confidence: Confidence, sure: Tensor) -> dict[str, float]:
    """Set a confidence's temperatures to fit held-out sums; reports them and the calibration errors that are left."""
    fitted = fitted_temperatures(sure)
    confidence.temperature.copy_(fitted)
    left = calibration_error(sure, fitted)
    report = {f"confidence_temperature_{i}": value for i, value in enumerate(fitted.tolist())}
    return report | {f"ece_calibrated_{i}": value for i, value in enumerate(left.tolist())}
