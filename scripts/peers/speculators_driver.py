"""speculators' EAGLE-3 (speculators 0.9.0): its draft model with TTT loop and loss, its shift, packing collator and optimizers.

Inside the step its frozen ``verifier_norm`` and ``verifier_lm_head`` (the target's rows of the draft vocabulary alone) make the
target's logits of all positions, and its frozen ``lm_head`` the draft's at every depth. The loss mask stays where speculators
has it: with (x1, g0, y1) goes that of x1. Each depth's loss is a mean over the supervised positions, and the depths are summed.

Replaced, for a CPU and float32:
- Its Trainer takes an accelerator or nothing ("Cannot access accelerator device when none is available."): what its
  ``train_epoch`` calls is called here, in that order.
- Losses are Triton kernels by default, which no CPU runs: ``loss_implementation="eager"`` is its own other choice.
- Attention is by default ``simple_flex_attention`` ("FlexAttention does not support backward on CPU"): ``sdpa`` is what it
  offers to hardware without it. Its mask is dense, so packed rows also pay for the scores between them: the fewer rows in a
  micro-batch, the less. ``torch.compile`` is its own decision, and without CUDA it decides against it.
- bfloat16 autocast is off: ``hidden_states_dtype="float32"``.
- The final norm's input is what it wants as last hidden state. ``last`` divided by the norm's gain is that, up to a positive
  factor at every position, which the norm takes out again.
- A batch is packed into a sequence as long as its rows, where its collator would fill up to ``total_seq_len`` (8192).
- It takes one packed batch an optimizer step: here several micro-batches give the mean of their gradients.
- Its checkpoints are bfloat16; ``save`` calls the same ``save_pretrained`` in float32.
"""
# pyright: reportMissingImports=false

import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from driver import Data, Row, Settings, serve
from speculators.models.eagle3 import Eagle3DraftModel, shift_batch
from speculators.train.cli import build_draft_model
from speculators.train.config import TrainConfig
from speculators.train.data import CollateFn
from speculators.train.optimizers import build_optimizers
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_linear_schedule_with_warmup


def configuration(data: Data, settings: Settings) -> Namespace:
    """A run's arguments. What is not named here keeps its default of speculators/train/config/schema.py.

    ``own`` leaves there: Muon for matrices and AdamW for the norms, both with lr 1e-3, and weight decay 0.1 and 0.01; a linear
    schedule; kl_div; norm_before_fc, norm_before_residual and norm_output, which the paper's head has not; a window of 2048.
    """
    draft: dict[str, Any] = {"target_layer_ids": data.bench["taps"], "draft_attn_impl": "sdpa"}
    optimizer: dict[str, Any] = {}
    if not settings.own:
        draft |= {"norm_before_fc": False, "norm_before_residual": False, "norm_output": False, "full_attention_indices": [0]}
        optimizer = {"optimizer": "adamw", "lr": settings.lr, "weight_decay": settings.weight_decay}
    config = TrainConfig.model_validate(
        {
            "verifier": {"verifier_name_or_path": str(data.place / "target")},
            "draft": draft,
            "loss": {"ttt_steps": settings.depths, "loss_implementation": "eager"},
            "optimizer": optimizer,
        }
    )
    return Namespace(**config.flatten())


class Speculators:
    def __init__(self, data: Data, settings: Settings) -> None:
        args, ids = configuration(data, settings), data.ends["target_ids"]
        t2d = torch.zeros(len(data.ends["embed"]), dtype=torch.bool)
        t2d[ids] = True
        # transformers' random weights (initializer_range) between the target's embedding and lm_head, which are frozen
        self.model = build_draft_model(args, Eagle3DraftModel, t2d, ids - torch.arange(len(ids)), len(ids))
        self.model.train()
        self.call, _ = self.model.get_trainer_kwargs(**vars(args))
        self.gain, self.hidden, self.taps = data.ends["norm"], data.config["hidden_size"], len(data.bench["taps"])
        self.optimizers = build_optimizers(self.model, args)
        # its trainer's clip is 1.0, and cannot be set
        self.clip = 1.0 if settings.own else settings.clip
        self.schedulers = [self.schedule(optimizer, settings) for optimizer in self.optimizers]

    def schedule(self, optimizer: torch.optim.Optimizer, settings: Settings) -> LambdaLR:
        """``own``: as _resolve_scheduler_steps and setup_optimizer of speculators/train/trainer.py make it."""
        if settings.own:
            return get_linear_schedule_with_warmup(optimizer, settings.steps // 100, settings.steps)
        for group in optimizer.param_groups:
            group["betas"] = settings.betas
        warm = max(1, settings.warmup)

        def rate(done: int) -> float:
            progress = min((done + 1 - warm) / max(1, settings.steps - warm), 1.0)
            return (done + 1) / warm if done < warm else 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2

        return LambdaLR(optimizer, rate)

    def parameters(self) -> list[Tensor]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def step(self, batches: list[list[Row]]) -> float:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        total = 0.0
        for rows in batches:
            _, loss, _ = self.model(**self.batch(rows), **self.call)
            (loss / len(batches)).backward()
            total += loss.item() / len(batches)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        for part in (*self.optimizers, *self.schedulers):
            part.step()
        return total

    def batch(self, rows: list[Row]) -> dict[str, Any]:
        samples = [
            {
                "input_ids": row.ids,
                "hidden_states": row.taps,
                "verifier_last_hidden_states": row.last / self.gain,
                "loss_mask": row.mask,
                "lengths": torch.tensor([len(row.ids)]),
                "position_ids": torch.arange(len(row.ids)),
            }
            for row in rows
        ]
        length = sum(len(row.ids) - 1 for row in rows)
        return CollateFn(length, self.hidden, self.taps, torch.float32, shift_batch)(samples)

    def save(self, place: Path) -> None:
        self.model.save_pretrained(place)


serve(Speculators)
