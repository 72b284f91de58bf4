"""SpecForge's EAGLE-3 (specforge 0.2.0): its draft model, its offline strategy with TTT loop and loss, its core and optimizer.

Rows go through its own offline normalization and its padding collator. Inside the step its TargetHead computes the target's
logits of all positions over the whole vocabulary (``compact_teacher`` is off by default), as its trainer does. The loss mask
stays where SpecForge has it: at x_t, with a row's last position off; each depth's loss is a mean over all positions, padding
included, and the depths are weighted by 0.8^i.

Replaced, for a CPU and float32:
- The loss is a Triton kernel (``LogSoftmaxLoss``), which no CPU runs: "0 active drivers ([]). There should only be one." Its
  place takes the reference that stands beside it in specforge/core/loss.py (``_compute_loss``), compiled, as it is there: loss
  and gradient are those of the kernel under Triton's interpreter. The kernel skips masked positions; the reference computes
  them and multiplies by 0.
- Attention is its ``sdpa``, the draft model's own default (explicit scores over depth 0, one diagonal per further depth); the
  trainer's default, ``flex_attention``, has no backward on a CPU.
- FSDP with bfloat16 mixed precision is left out (``wrap=False``). The optimizer keeps its float32 master copies all the same.
- ``TargetHead.from_pretrained`` asks for sharded, untied weights and casts to bfloat16: its weight is copied in here.

``torch.compile`` is used where SpecForge has it as a decorator: norms, rotary embedding, target probabilities and the loss.
"""
# pyright: reportMissingImports=false

import math
from pathlib import Path
from typing import Any

import specforge.algorithms.eagle3.model as eagle3
import torch
from driver import Data, Row, Settings, serve
from specforge.algorithms.eagle3.data import build_offline_collator, build_offline_normalizer
from specforge.algorithms.eagle3.providers import algorithm_providers, build_draft, build_step, step_options
from specforge.config import Config
from specforge.core.loss import _compute_loss
from specforge.export.checkpoint_io import apply_legacy_rope_scaling
from specforge.modeling.target.target_head import TargetHead
from specforge.optimizer import BF16Optimizer
from specforge.runtime import TrainBatch
from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
from specforge.training.controller import TrainerCore
from specforge.training.model_loading import resolve_draft_config
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR


class ReferenceLoss:
    apply = staticmethod(_compute_loss)


eagle3.LogSoftmaxLoss = ReferenceLoss


def configuration(data: Data, settings: Settings) -> Config:
    """A run's config. What is not named here keeps its default of specforge/config/schema.py (of ttt_length it is 7)."""
    training: dict[str, Any] = {"ttt_length": settings.depths, "attention_backend": "sdpa", "total_steps": settings.steps}
    if not settings.own:
        training |= {"learning_rate": settings.lr, "max_grad_norm": settings.clip}
    target = {"target_model_path": str(data.place / "target"), "torch_dtype": "float32"}
    return Config.model_validate({"model": target, "data": {"hidden_states_path": str(data.place)}, "training": training})


def make_optimizer(model: torch.nn.Module, config: Config, settings: Settings) -> BF16Optimizer:
    """As specforge/training/assembly.py makes it. ``own`` leaves TrainingConfig's lr 1e-4, clip 0.5, warm-up over 1.5 % of the
    steps and cosine to 0, BF16Optimizer's weight decay 0, and the betas 0.9 and 0.999 of torch's AdamW, which it does not set.
    """
    own = config.training
    optimizer = BF16Optimizer(
        model,
        lr=own.learning_rate,
        weight_decay=0.0 if settings.own else settings.weight_decay,
        max_grad_norm=own.max_grad_norm,
        total_steps=settings.steps,
        warmup_ratio=own.warmup_ratio,
        lr_scheduler=own.lr_scheduler,
        offload_master=own.optimizer_cpu_offload,
    )
    if not settings.own:
        for group in optimizer.optimizer.param_groups:
            group["betas"] = settings.betas
        warm = max(1, settings.warmup)

        def rate(done: int) -> float:
            progress = min((done + 1 - warm) / max(1, settings.steps - warm), 1.0)
            return (done + 1) / warm if done < warm else 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2

        optimizer.scheduler = LambdaLR(optimizer.optimizer, rate)
    return optimizer


class SpecForge:
    def __init__(self, data: Data, settings: Settings) -> None:
        config = configuration(data, settings)
        draft_config = resolve_draft_config(config, provider=algorithm_providers().model.draft_config)
        draft_config.draft_vocab_size = len(data.ends["target_ids"])
        # layers by their outputs, one lower than by their inputs
        draft_config.eagle_config = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in data.bench["taps"]]}
        # random weights (initializer_range) around the target's embedding, which is frozen
        self.draft = build_draft(config, draft_config)
        self.draft.d2t.copy_(data.ends["target_ids"] - torch.arange(len(data.ends["target_ids"])))
        self.draft.t2d.zero_()[data.ends["target_ids"]] = True
        model = eagle3.OnlineEagle3Model(
            self.draft,
            length=config.training.ttt_length,
            attention_backend=config.training.attention_backend,
            lk_loss_type=config.training.lk_loss_type,
            kl_scale=config.training.kl_scale,
            kl_decay=config.training.kl_decay,
        )
        target_head = TargetHead(config.model.target_model_path)
        target_head.fc.weight.data.copy_(data.ends["lm_head"])
        target_head.eval().freeze_weights()
        backend = FSDPTrainingBackend(
            ParallelConfig.from_distributed(param_dtype=torch.float32),
            optimizer_factory=lambda draft: make_optimizer(draft, config, settings),
        )
        backend.prepare_model(model, wrap=False, optimizer_target=self.draft)
        strategy = build_step(model, target_head=target_head, **step_options(config))
        self.core = TrainerCore(strategy, backend)
        self.normalize, self.collate = build_offline_normalizer(config.data.max_length), build_offline_collator()

    def parameters(self) -> list[Tensor]:
        return [parameter for parameter in self.draft.parameters() if parameter.requires_grad]

    def step(self, batches: list[list[Row]]) -> float:
        self.core.accumulation_steps = len(batches)
        losses = [self.core.train_step(self.batch(rows)).loss for rows in batches]
        return sum(losses) / len(losses)

    def batch(self, rows: list[Row]) -> TrainBatch:
        stored = (
            {"input_ids": row.ids, "loss_mask": row.mask.long(), "aux_hidden_state": row.taps, "hidden_state": row.last}
            for row in rows
        )
        tensors = self.collate([self.normalize(row) for row in stored])
        return TrainBatch([], "eagle3", tensors, {"target_repr": "hidden_state"})

    def save(self, place: Path) -> None:
        """What export_to_hf writes, from the live model: through a training state it would pass it through bfloat16."""
        self.draft.save_pretrained(place)
        apply_legacy_rope_scaling(str(place))


serve(SpecForge)
