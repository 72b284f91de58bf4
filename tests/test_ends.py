"""A target without its layers: what it computes is what the whole one does, from a few tensors of the checkpoint."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, GQA, HIDDEN, VOCAB, build, saved
from safetensors.torch import load_file, save_file
from transformers import BloomConfig, CohereConfig, DeepseekV3Config, Gemma3TextConfig, Qwen3MoeConfig

from draftsmith.ends import Ends
from draftsmith.errors import UserError
from draftsmith.heads.kinds import KINDS
from draftsmith.target import Target
from draftsmith.weights import INDEX, WHOLE

MORE: dict[str, Any] = {
    "qwen3-moe": Qwen3MoeConfig(**GQA, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
    "gemma3-capped": Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, final_logit_softcapping=3.0, max_position_embeddings=64,
    ),
    "deepseek-v3": DeepseekV3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2,
        kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
        max_position_embeddings=64,
    ),
    "cohere": CohereConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, logit_scale=0.1,
        num_key_value_heads=2, max_position_embeddings=64,
    ),
    "bloom": BloomConfig(vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=3, n_head=4),
}  # fmt: skip


@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
@pytest.mark.parametrize("shard", ["1GB", "20kB"])
def test_the_ends_compute_what_the_whole_target_does(family: str, shard: str, tmp_path: Path) -> None:
    directory = str(saved(build((FAMILIES | MORE)[family]), tmp_path / "target", shard))
    whole, ends = Target.load(directory), Ends.load(directory)
    assert (tmp_path / "target" / (WHOLE if shard == "1GB" else INDEX)).exists()
    assert ends.fingerprint == whole.fingerprint and ends.dtype == whole.dtype and ends.eos_ids == whole.eos_ids
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(ends.embed(ids), whole.embed(ids), rtol=0, atol=0)
    features = whole.features(ids, [whole.depth])
    assert (ends.final_norm is None) == (whole.final_norm is None)
    last = features.taps if ends.final_norm is None else ends.final_norm(features.taps)
    torch.testing.assert_close(last, features.last, rtol=0, atol=0)
    torch.testing.assert_close(ends.logits(features.last), whole.logits(features.last), rtol=0, atol=0)
    assert all(parameter.is_meta for layer in ends.layers for parameter in layer.parameters())


def test_only_the_ends_are_read(tmp_path: Path) -> None:
    """The shards that hold layers alone may be anywhere: here they are gone."""
    directory = saved(build(FAMILIES["llama"]), tmp_path / "target", "20kB")
    index = json.loads((directory / INDEX).read_text())["weight_map"]
    needed = {file for name, file in index.items() if ".layers." not in name}
    gone = set(index.values()) - needed
    whole = Target.load(str(directory))
    for file in gone:
        (directory / file).unlink()
    assert gone
    ends = Ends.load(str(directory))
    last = torch.randn(5, HIDDEN)
    torch.testing.assert_close(ends.logits(last), whole.logits(last), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32"])
def test_the_dtype_is_the_checkpoints_or_the_named_one(dtype: str, tmp_path: Path) -> None:
    target = build(FAMILIES["llama"])
    Target(target.model.to(torch.float16), None, "half")
    directory = str(saved(target, tmp_path / "target"))
    whole, ends = Target.load(directory, dtype), Ends.load(directory, dtype)
    assert ends.dtype == whole.dtype == ends.logits(torch.randn(2, HIDDEN)).dtype
    last = torch.randn(5, HIDDEN)
    torch.testing.assert_close(ends.logits(last), whole.logits(last), rtol=0, atol=0)


def test_an_untied_head_under_a_config_that_ties_stays_its_own(tmp_path: Path) -> None:
    directory = saved(build(FAMILIES["llama"]), tmp_path / "target")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    whole, ends = Target.load(str(directory)), Ends.load(str(directory))
    last = torch.randn(5, HIDDEN)
    torch.testing.assert_close(ends.logits(last), whole.logits(last), rtol=0, atol=0)


def test_a_head_starts_from_the_targets_last_layer_alike(tmp_path: Path) -> None:
    directory = str(saved(build(FAMILIES["llama"]), tmp_path / "target", "20kB"))
    whole, ends = Target.load(directory), Ends.load(directory)
    ids = torch.arange(VOCAB)
    for kind in ("eagle3", "peagle", "draft_model", "dflash", "medusa"):
        options = {"mask_token": 7} if kind in ("peagle", "dflash") else {}
        heads = []
        for target in (whole, ends):
            torch.manual_seed(0)
            chosen = KINDS[kind].Options.model_validate(options)
            heads.append(KINDS[kind].create(target, chosen, None, 3, ids).state_dict())
        for name, tensor in heads[0].items():
            torch.testing.assert_close(heads[1][name], tensor, rtol=0, atol=0)


def test_what_needs_the_layers_is_refused(tmp_path: Path) -> None:
    ends = Ends.load(str(saved(build(FAMILIES["llama"]), tmp_path / "target")))
    with pytest.raises(UserError, match="without its layers.*init_layer"):
        ends.features(torch.tensor([[1, 2]]), [1])
    with pytest.raises(UserError, match="without its layers"):
        KINDS["eagle"].create(ends, KINDS["eagle"].Options(), None, 3, torch.arange(VOCAB))


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda held: held.pop("model.norm.weight"), "has no tensor 'model.norm.weight'"),
        (lambda held: held.update({"lm_head.weight": held["lm_head.weight"].to(torch.int8)}), "does not quantize it"),
        (lambda held: held.update({"lm_head.weight": held["lm_head.weight"][:5].clone()}), "name a checkpoint"),
    ],
)
def test_a_checkpoint_that_lacks_an_end_is_refused(damage: Any, said: str, tmp_path: Path) -> None:
    directory = saved(build(FAMILIES["llama"]), tmp_path / "target")
    held = load_file(directory / WHOLE)
    damage(held)
    save_file(held, directory / WHOLE, {"format": "pt"})
    with pytest.raises(UserError, match=said):
        Ends.load(str(directory))


def test_files_that_are_damaged_or_not_there_are_named(tmp_path: Path) -> None:
    directory = saved(build(FAMILIES["llama"]), tmp_path / "target")
    (directory / WHOLE).write_bytes((directory / WHOLE).read_bytes()[:100])
    with pytest.raises(UserError, match="model.safetensors is damaged"):
        Ends.load(str(directory))
    shutil.copy(directory / "config.json", tmp_path)
    with pytest.raises(UserError, match="save the target as safetensors"):
        Ends.load(str(tmp_path))
