"""How Hydra heads are stored: the directory of Hydra's own repository (zankner/Hydra 3f39fbd: hydra_model.py, mlp_head.py,
prefix_mlp_head.py), which runs Llama targets alone."""

from typing import Any

import torch
from torch import Tensor

from ...errors import UserError
from ...target import Target
from ..base import DraftHead
from ..hydra import HydraHead
from ..layers import llama_layer_config, rope_parameters
from .layout import Layout, make_head, own_tensors, provenance

ROPE = {"rope_type": "default", "rope_theta": 10000.0}  # its Llama has no other
PREFIX = "prefix_embeding_layer."  # sic
NEVER = -1e4  # the bias of a token that is not drafted: a finite number in float16, too
UNREAD = (PREFIX + "embed_tokens.weight", PREFIX + "layers.0.self_attn.rotary_emb.inv_freq")


def config(head: DraftHead, target: Target, draft_length: int) -> dict[str, Any]:
    return {
        "hydra_num_heads": head.config.depths,
        "hydra_num_layers": head.options.blocks,
        "hydra_head_arch": "prefix-mlp" if head.options.prefix else "mlp",
        "base_model_name_or_path": target.name,
        "grounded_heads": True,  # the class's own default is False: heads that read no drafted token
        "hidden_state_offset": 0,
        "draftsmith": provenance(head, draft_length),
    }


def tensors(head: DraftHead, target: Target) -> dict[str, Tensor]:
    """``hydra_mlp.{head}.{place}.{linear,res_connection}``, ``hydra_lm_head.{head}`` and, with the prefix layer, its
    ``layers.0`` and ``norm`` under ``prefix_embeding_layer``. Blocks and lm_heads then stand behind dropouts that count.

    A reduced vocabulary is spread over all tokens, those outside it with a bias that keeps them out of every draft, and
    ``token_map``, which the loader passes over, names the real rows.
    """
    check(head, target)
    ids, vocab = head.target_ids.cpu(), target.vocab_size
    reduced = len(ids) < vocab
    found = {}
    for name, tensor in own_tensors(head).items():
        part, *rest = name.split(".")
        if part == "blocks":
            place = 2 * int(rest[1]) + 1 if head.options.prefix else rest[1]
            found[f"hydra_mlp.{rest[0]}.{place}.{rest[2].replace('residual', 'res_connection')}.{rest[3]}"] = tensor
        elif part == "lm_heads":
            where = f"{rest[0]}.1" if head.options.prefix else rest[0]
            outside = NEVER if rest[1] == "bias" else 0.0
            spread = tensor.new_full((vocab, *tensor.shape[1:]), outside).index_copy(0, ids, tensor)
            found[f"hydra_lm_head.{where}.{rest[1]}"] = spread if reduced else tensor
        elif part == "prefix":
            found[PREFIX + ".".join(rest).replace("layer.", "layers.0.", 1)] = tensor
    return found | ({"token_map": ids} if reduced else {})


def check(head: DraftHead, target: Target) -> None:
    """Refuse what the repository's classes cannot hold or would compute otherwise."""
    if head.options.lm_head == "shared":
        raise UserError("Hydra's repository gives every head an lm_head of its own: train with options.lm_head own.")
    for own in head.get_submodule("blocks").children():
        _, *further = [torch.cat([p.flatten() for p in block.parameters()]) for block in own.children()]
        if any(not torch.equal(block, further[0]) for block in further):
            raise UserError(
                "Hydra's repository runs one block in place of all further blocks of a head, so three or more different "
                "blocks would not be these ones there: train with options.blocks 1 or 2."
            )
    architecture, rope = head.config.target.architecture, rope_parameters(target.config)
    if architecture != "LlamaForCausalLM" or rope != ROPE:
        raise UserError(
            f"Hydra's repository runs Llama targets with RoPE base 10000 alone, and {target.name} is a {architecture} with "
            f"{rope}: measure this head with draftsmith eval."
        )
    if head.config.layer and head.config.layer["head_dim"] * head.config.layer["num_attention_heads"] != target.hidden_size:
        raise UserError(f"Hydra's prefix layer has heads of hidden size / heads, and {target.name} has others: leave it out.")


def rebuild(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> DraftHead:
    """Published files hold the target's embedding besides, and of the prefix layer what nothing reads."""
    arch, grounded = config.get("hydra_head_arch", "mlp"), config.get("grounded_heads", False)
    offset = config.get("hidden_state_offset", 0)
    if arch not in ("mlp", "prefix-mlp") or not grounded or offset:
        raise UserError(
            f"the Hydra checkpoint has hydra_head_arch {arch!r}, grounded_heads {grounded} and hidden_state_offset {offset}: "
            "draftsmith reads mlp and prefix-mlp, True and 0 alone."
        )
    prefix, own = arch == "prefix-mlp", {}
    ids = tensors.get("token_map")
    for name, tensor in tensors.items():
        part, *rest = name.split(".")
        if name == "input_embed_fn.weight":
            if not torch.equal(tensor, target.embed.get_parameter("weight").detach().cpu().to(tensor.dtype)):
                raise UserError(f"the Hydra checkpoint's {name} is not {target.name}'s embedding: it is another target's.")
        elif part == "hydra_mlp":
            block = int(rest[1]) // 2 if prefix else rest[1]
            own[f"blocks.{rest[0]}.{block}.{rest[2].replace('res_connection', 'residual')}.{rest[3]}"] = tensor
        elif part == "hydra_lm_head":
            own[f"lm_heads.{rest[0]}.{rest[-1]}"] = tensor if ids is None else tensor[ids]
        elif name.startswith(PREFIX) and name not in UNREAD:
            own["prefix." + name.removeprefix(PREFIX).replace("layers.0.", "layer.", 1)] = tensor
        elif name not in (*UNREAD, "token_map"):
            raise UserError(f"the Hydra checkpoint's tensor {name!r} is of no part that draftsmith knows.")
    return make_head(
        HydraHead,
        target,
        torch.arange(target.vocab_size) if ids is None else ids,
        own,
        taps=[],
        depths=config.get("hydra_num_heads", 4),
        options={"blocks": config.get("hydra_num_layers", 1), "prefix": prefix},
        layer=llama_layer_config(target) | {"rope_parameters": ROPE} if prefix else {},
    )


def tells(config: dict[str, Any]) -> bool:
    return "hydra_num_heads" in config


REPOSITORY = Layout(config, tensors, rebuild, method="hydra", tells=tells, file="hydra_lm_head.pt")
