"""NeMo AutoModel's EAGLE-3 (nemo-automodel 0.7.0): its draft model and its trainer module, with TTT loop, loss and metrics.

Rows are padded to the right; ids, target logits and loss mask are shifted left by one with its own helper, as its target
wrapper does. Inside the step the target's logits of all positions are computed over the whole vocabulary, which is the end of
the target's forward there, and its trainer module makes the distribution over the draft vocabulary of them.

Replaced, for a CPU:
- Its recipe (``train_eagle3``) sets up processes, data and target: what it does between batch and optimizer is called here.
- Rows are padded to the longest of their micro-batch, where its loader pads all to ``seq_length``; packing is off by default.
- The taps are written into the config, where it leaves them to the engine's default.
- ``save`` is the draft model's ``save_pretrained``; its checkpointer would also write the optimizer's and the run's state.

Its own on a CPU, and kept: ``eager`` attention (the default), float32, and the loss in torch, as its kernel asks for CUDA. Its
offline cache (``cached_target_path``, off by default) would take the distribution from disk, and no step the target's logits.
"""
# pyright: reportMissingImports=false

import math
from pathlib import Path

import torch
from driver import Data, Row, Settings, serve
from nemo_automodel.components.speculative.eagle.core import Eagle3TrainerModule, _shift_left_with_zero
from nemo_automodel.components.speculative.eagle.draft_llama import LlamaEagle3DraftModel
from nemo_automodel.recipes.llm._spec_train_utils import make_warmup_cosine_schedule
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig


class AutoModel:
    def __init__(self, data: Data, settings: Settings) -> None:
        ids = data.ends["target_ids"]
        base = AutoConfig.from_pretrained(data.place / "target")
        config = base.to_dict() | {
            "draft_vocab_size": len(ids),
            "target_hidden_size": base.hidden_size,
            "architectures": ["LlamaEagle3DraftModel"],
            "tie_word_embeddings": False,
            "attn_implementation": "eager",
            "fc_norm": False,
            "norm_output": False,
            "parallel_drafting": False,
            "torch_dtype": "float32",
            # layers by their outputs, one lower than by their inputs
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in data.bench["taps"]]},
        }
        self.draft = LlamaEagle3DraftModel(type(base).from_dict(config)).float()
        embedding = torch.nn.Embedding.from_pretrained(data.ends["embed"])
        self.draft.copy_embeddings_from_target(embedding)
        self.draft.set_vocab_mapping(ids)
        self.draft.freeze_embeddings()
        chosen = torch.zeros(len(data.ends["embed"]), dtype=torch.bool)
        chosen[ids] = True
        self.module = Eagle3TrainerModule(
            self.draft, selected_token_ids=ids, selected_token_mask=chosen, ttt_steps=settings.depths
        )
        self.lm_head, self.data = data.ends["lm_head"], data
        # own: train_eagle3's defaults, which are betas, no weight decay, clip 1.0, 5 % warm-up and cosine to 10 %; it has none
        # for the lr: 2e-4 is that of examples/speculative/eagle3/llama_eagle3_perfectblend.yaml. Weights are normal, 0.02, by
        # transformers' post_init.
        own = settings.own
        self.clip = 1.0 if own else settings.clip
        self.optimizer = torch.optim.AdamW(
            self.parameters(),
            lr=2e-4 if own else settings.lr,
            betas=(0.9, 0.95) if own else settings.betas,
            weight_decay=0.0 if own else settings.weight_decay,
        )
        if own:
            rate = make_warmup_cosine_schedule(max(1, int(0.05 * settings.steps)), settings.steps, 0.1)
        else:
            warm = max(1, settings.warmup)

            def rate(done: int) -> float:
                progress = min((done + 1 - warm) / max(1, settings.steps - warm), 1.0)
                return (done + 1) / warm if done < warm else 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2

        self.scheduler = LambdaLR(self.optimizer, rate)

    def parameters(self) -> list[Tensor]:
        return [parameter for parameter in self.draft.parameters() if parameter.requires_grad]

    def step(self, batches: list[list[Row]]) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for rows in batches:
            found = self.module(**self.batch(rows))
            (found.loss / len(batches)).backward()
            total += found.loss.item() / len(batches)
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
        self.optimizer.step()
        self.scheduler.step()
        return total

    def batch(self, rows: list[Row]) -> dict[str, Tensor]:
        lines = self.data.padded(rows)
        sizes = torch.tensor([len(row.ids) for row in rows])
        with torch.no_grad():
            logits = F.linear(lines.last, self.lm_head)
        return {
            "input_ids": _shift_left_with_zero(lines.ids),
            "attention_mask": (torch.arange(lines.ids.shape[1]) < sizes[:, None]).long(),
            "loss_mask": _shift_left_with_zero(lines.mask.long()),
            "aux_hidden_states": lines.taps,
            "target_logits": _shift_left_with_zero(logits),
        }

    def save(self, place: Path) -> None:
        self.draft.save_pretrained(place)


serve(AutoModel)
