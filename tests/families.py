"""Every family of targets, tiny and random."""

import copy
from pathlib import Path
from typing import Any

import torch
from conftest import build_tokenizer
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)  # fmt: skip
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from draftsmith.target import Target

DEPTH, VOCAB, HIDDEN = 4, 96, 32
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=DEPTH, num_attention_heads=4,
    max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
GQA: dict[str, Any] = SIZES | {"num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
WINDOW = 5
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**GQA),
    "llama-tied": LlamaConfig(**GQA, tie_word_embeddings=True),
    "llama3-rope": LlamaConfig(**GQA, rope_parameters=LLAMA3),
    "qwen2": Qwen2Config(**GQA),
    "qwen3": Qwen3Config(**GQA, head_dim=16),
    "qwen3-kv1": Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=16),
    "qwen2-sliding": Qwen2Config(**GQA, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
    "mistral-sliding": MistralConfig(**GQA, sliding_window=WINDOW),
    "phi3-sliding": Phi3Config(**GQA, sliding_window=WINDOW),
    "mixtral": MixtralConfig(**GQA, num_local_experts=4, num_experts_per_tok=2),
    "gemma2": Gemma2Config(
        **GQA, head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=16,
        final_logit_softcapping=3.0, attn_logit_softcapping=5.0,
    ),
    "gemma3": Gemma3TextConfig(
        **GQA, head_dim=16, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "gpt2": GPT2Config(
        vocab_size=VOCAB, n_embd=HIDDEN, n_layer=DEPTH, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    "gpt-neox": GPTNeoXConfig(**SIZES),
    "gpt-neox-tied": GPTNeoXConfig(**SIZES, tie_word_embeddings=True),
}  # fmt: skip
NORMS = {"gpt2": "transformer.ln_f", "gpt-neox": "gpt_neox.final_layer_norm", "gpt-neox-tied": "gpt_neox.final_layer_norm"}


def build(config: Any) -> Target:
    """A random model whose layers, norms and biases all matter; the library's own small start would hide a wrong mask."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return Target(model, None, "tiny")


def saved(target: Target, directory: Path, shard: str = "1GB") -> Path:
    """The target as a checkpoint with the tiny tokenizer, in files of at most ``shard``."""
    target.model.save_pretrained(directory, max_shard_size=shard)
    build_tokenizer().save_pretrained(directory)
    return directory
