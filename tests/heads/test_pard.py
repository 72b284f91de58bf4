"""PARD: every depth is the LM behind real tokens and masks, chains of masks are sampled, one token is the mask's own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import make_head
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, PreTrainedModel

from draftsmith.data.features import FeatureBatch
from draftsmith.errors import UserError
from draftsmith.eval.tree import chain
from draftsmith.eval.verifier import generate
from draftsmith.heads.base import Depth, DraftHead
from draftsmith.heads.engines.published import import_head
from draftsmith.heads.engines.registry import ENGINES, export
from draftsmith.heads.kinds import load_head
from draftsmith.heads.mask_token import mask_token
from draftsmith.heads.pard import PardHead, PardOptions
from draftsmith.target import Features, Target
from draftsmith.train.objectives import Objective
from draftsmith.train.step import judged

MASK = 127
SIZES: dict[str, Any] = dict(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=64
)
LMS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "sliding": Gemma3TextConfig(
        **SIZES, head_dim=8, num_key_value_heads=2, sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "learned-positions": GPT2Config(
        vocab_size=128, n_embd=32, n_layer=4, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None
    ),
}


def random_lm(config: Any, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    lm = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return lm.eval()


def pard(target: Target, depths: int = 4, taps: list[int] | None = None, **options: Any) -> PardHead:
    settings = PardOptions(**{"layers": 2, "mask_token": MASK, "ratio": 1.0, **options})
    return PardHead.create(target, settings, taps, depths, torch.arange(128)).eval()


def all_depths(
    head: DraftHead, ids: Tensor, target: Target, mask: Tensor | None = None, positions: Tensor | None = None, seed: int = 0
) -> list[Depth]:
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    features = target.features(ids, head.config.taps, positions)
    return head.predict(ids, head.taught(ids, mask, seed), features, target, positions)


def random_ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 111, shape, generator=torch.Generator().manual_seed(seed))


# -- what a depth reads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LMS)
@torch.no_grad()
def test_depth_d_is_the_lm_behind_d_masks(name: str) -> None:
    """Every (row, depth) of two packed lines against the LM on its own sequence: x_0 .. x_{t+1}, then d masks."""
    target = Target(random_lm(LMS[name]), None, name)
    head = pard(target)
    lm = head.get_submodule("lm")
    ids = random_ids(2, 19)
    positions = torch.cat([torch.arange(8), torch.arange(11)]).repeat(2, 1)
    mask = positions > 0
    depths = all_depths(head, ids, target, mask, positions)
    assert [len(depth.rows) for depth in depths] == [2 * (15 - 2 * d) for d in range(4)]
    for d, depth in enumerate(depths):
        assert depth.ahead == 1 + d
        for flat, logits in zip(depth.rows.tolist(), depth.logits, strict=True):
            line, t = divmod(flat, 19)
            start = 0 if t < 8 else 8
            sequence = torch.cat([ids[line, start : t + 2], torch.full((d,), MASK)])[None]
            torch.testing.assert_close(logits, lm(sequence).logits[0, -1], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_it_is_the_papers_blocks(tiny_target: Target) -> None:
    """K blocks of the line's length one behind the other: block b at t reads the real tokens up to t - b and the masks of
    blocks 1 .. b on the diagonal, and predicts x_{t+1}."""
    head, time, blocks = pard(tiny_target, depths=4), 12, 4
    lm = head.get_submodule("lm")
    ids = random_ids(1, time)
    lowest = torch.finfo(torch.float32).min
    mask = torch.full((blocks * time, blocks * time), lowest)
    for b in range(blocks):
        for t in range(time):
            mask[b * time + t, : t - b + 1] = 0
            for i in range(b):
                if t - i >= 0:
                    mask[b * time + t, (b - i) * time + t - i] = 0
            mask[b * time + t, b * time + t] = 0
    laid_out = torch.cat([ids, torch.full((1, (blocks - 1) * time), MASK)], 1)
    logits = lm(laid_out, position_ids=torch.arange(time).repeat(blocks)[None], attention_mask=mask[None, None]).logits[0]
    for d, depth in enumerate(all_depths(head, ids, tiny_target)):
        wanted = logits[d * time + depth.rows + 1 + d]
        torch.testing.assert_close(depth.logits, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("depths", [1, 5])
def test_it_drafts_to_the_end_of_the_context(depths: int) -> None:
    """Learned positions end there, and what is drafted beyond is never asked for. Real tokens alone stay in the cache."""
    target = Target(random_lm(LMS["learned-positions"]), None, "gpt2")
    head = pard(target, depths=depths, layers=4)
    plain = generate(target, None, [5, 6, 7], chain(1), 90).tokens
    assert len(plain) == 61
    assert generate(target, head, [5, 6, 7], chain(depths), 90).tokens == plain
    state, ids = head.new_state(), random_ids(9)
    head.begin(state, target.features(ids[None], []).rows((0, slice(0, 6))), ids[:7], target)
    head.begin(state, target.features(ids[None], []).rows((0, slice(6, 8))), ids[6:], target)
    assert state.own.cache.get_seq_length() == state.own.committed == 9


# -- which chains are taught -----------------------------------------------------------------------------------


def test_chains_are_dropped_from_depth_to_depth(tiny_target: Target) -> None:
    head = pard(tiny_target, depths=6, ratio=0.6, ratio_min=0.25)
    ids = random_ids(8, 400)
    mask = torch.ones_like(ids, dtype=torch.bool)
    maps, again, others = (head.taught(ids, mask, seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(maps, again, strict=True))
    assert not torch.equal(maps[2], others[2])
    assert maps[0].sum() == 8 * 398
    for d, (deeper, own) in enumerate(zip(maps[1:], maps, strict=False), start=1):
        assert not (deeper & ~own).any()
        assert deeper.sum() / (8 * 398) == pytest.approx(max(0.6**d, 0.25), abs=0.04)


def test_a_dropped_chain_changes_no_other(tiny_target: Target) -> None:
    """What is taught of a sample are the numbers of the whole, each with the label of its own place."""
    ids = random_ids(3, 20)
    whole, sampled = pard(tiny_target), pard(tiny_target, ratio=0.5)
    sampled.load_state_dict(whole.state_dict())
    for full, kept in zip(all_depths(whole, ids, tiny_target), all_depths(sampled, ids, tiny_target), strict=True):
        place = torch.searchsorted(full.rows, kept.rows)
        assert torch.equal(full.rows[place], kept.rows)
        torch.testing.assert_close(kept.logits, full.logits[place], atol=1e-5, rtol=1e-5)
    assert len(kept.rows) < len(full.rows)


def test_labels_are_the_tokens_of_their_place(tiny_target: Target) -> None:
    """Cross-entropy of a sample = that of the LM run plainly, on x_{t+2+d}."""
    head, ids = pard(tiny_target, depths=3, ratio=0.5), random_ids(1, 16)
    batch = FeatureBatch(ids, torch.ones_like(ids, dtype=torch.bool), tiny_target.features(ids, []), None, 16)
    rows = head.taught(ids, batch.mask, 3)
    loss, _ = judged(head, batch, tiny_target, Objective("ce", depth_decay=1.0), rows, torch.ones(3))
    wanted = torch.zeros(())
    for d, own in enumerate(rows):
        for t in own[0].nonzero().flatten().tolist():
            sequence = torch.cat([ids[0, : t + 2], torch.full((d,), MASK)])[None]
            wanted += torch.nn.functional.cross_entropy(head.get_submodule("lm")(sequence).logits[0, -1], ids[0, t + 2 + d])
    torch.testing.assert_close(3 * loss, wanted, atol=1e-3, rtol=1e-4)


# -- the mask token --------------------------------------------------------------------------------------------


def test_the_first_row_behind_the_tokenizer_is_the_mask(tiny_target: Target) -> None:
    assert pard(tiny_target, mask_token=None).config.layer["pard_token"] == 111


@pytest.mark.parametrize("token", [2, 0, 1], ids=["end", "padding", "turn"])
def test_a_token_of_texts_is_no_mask(token: int, tiny_target: Target) -> None:
    with pytest.raises(UserError, match=f"mask_token {token} is a token that the texts of 'tiny' use"):
        pard(tiny_target, mask_token=token)


def test_a_token_of_the_chat_template_is_no_mask(tiny_tokenizer_factory: Callable[..., Any], tiny_target: Target) -> None:
    """<|im_start|> is in the template whatever role it has; a special token that is not is taken where no row is free."""
    tokenizer = tiny_tokenizer_factory()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<unused>", "<|im_start|>"]})
    tokenizer.bos_token = None
    target = Target(tiny_target.model, tokenizer, "tiny")
    with pytest.raises(UserError, match="mask_token 1 is a token that the texts"):
        mask_token(target, 1)
    target.vocab_size = 112
    assert mask_token(target, None) == 111 == tokenizer.convert_tokens_to_ids("<unused>")


def test_without_a_free_row_one_must_be_named(tiny_target: Target) -> None:
    target = Target(tiny_target.model, None, "tiny")
    with pytest.raises(UserError, match="set head.options.mask_token"):
        pard(target, mask_token=None)
    assert pard(target).config.layer["pard_token"] == MASK


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lora", [None, 4])
def test_the_masks_row_is_trained(tied: bool, lora: int | None) -> None:
    """With adapters it is the only row of the embedding that is."""
    target = Target(random_lm(LMS["tied" if tied else "llama"]), None, "tiny")
    head = pard(target, lora=lora).train()
    before = head.merged().get_submodule("lm").state_dict()["model.embed_tokens.weight"].clone()
    ids = random_ids(2, 16)
    batch = FeatureBatch(ids, torch.ones_like(ids, dtype=torch.bool), target.features(ids, []), None, 32)
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=1e-2)
    loss, _ = judged(head, batch, target, Objective("kl"), head.taught(ids, batch.mask, 0))
    loss.backward()
    optimizer.step()
    after = head.merged().get_submodule("lm").state_dict()["model.embed_tokens.weight"]
    moved = (after != before).any(-1).nonzero().flatten().tolist()
    assert MASK in moved and (moved == [MASK]) == (lora is not None)


# -- the target's states ---------------------------------------------------------------------------------------


@torch.no_grad()
def test_every_token_reads_the_last_state_known_before_it(tiny_target: Target) -> None:
    """A real token the state of the token before it, a mask that of the row it drafts for, a text's first token none."""
    head = pard(tiny_target, taps=[1, 4], features=True, feature_scale=0.5)
    lm: Any = head.get_submodule("lm")
    ids, positions = random_ids(1, 17), torch.cat([torch.arange(7), torch.arange(10)])[None]
    taps = tiny_target.features(ids, [1, 4], positions).taps[0]
    for d, depth in enumerate(all_depths(head, ids, tiny_target, positions > 0, positions)):
        for t, logits in zip(depth.rows.tolist(), depth.logits, strict=True):
            start = 0 if t < 7 else 7
            tokens = torch.cat([ids[0, start : t + 2], torch.full((d,), MASK)])
            known = torch.cat([torch.zeros(1, 64), taps[start : t + 1], taps[t].expand(d, -1)])
            read = lm.get_input_embeddings()(tokens) + 0.5 * head.target_proj(known)
            torch.testing.assert_close(logits, lm(inputs_embeds=read[None]).logits[0, -1], atol=1e-4, rtol=1e-4)


def test_states_are_left_out_of_whole_lines_in_training_alone(tiny_target: Target) -> None:
    head = pard(tiny_target, taps=[1, 4], features=True, feature_scale=1.0, feature_dropout=0.5)
    ids = random_ids(1, 12).repeat(16, 1)
    states = head.train().get_submodule("lm").get_input_embeddings()(ids)  # type: ignore[operator]
    torch.manual_seed(0)
    added = (head.informed(ids, torch.ones(16, 12, 64)) - states).abs().amax(-1) > 0
    assert torch.equal(added.any(-1), added.all(-1)) and 0 < added.any(-1).sum() < 16
    assert ((head.eval().informed(ids, torch.ones(16, 12, 64)) - states).abs().amax(-1) > 0).all()


def test_states_need_taps_and_go_to_no_engine(tiny_target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="head.taps names none"):
        pard(tiny_target, features=True)
    with pytest.raises(UserError, match="train the head without them"):
        export(make_head(tiny_target, "pard-features"), tiny_target, "vllm", tmp_path / "out", draft_length=4)


def test_without_states_nothing_is_read_of_the_target(tiny_target: Target) -> None:
    head, ids = pard(tiny_target), random_ids(1, 12)
    rows = head.taught(ids, torch.ones_like(ids, dtype=torch.bool), 0)
    nothing = Features(torch.zeros(1, 12, 0), torch.full((1, 12, 32), float("nan")))
    assert all(depth.logits.isfinite().all() for depth in head.predict(ids, rows, nothing, tiny_target))


# -- its directory for engines ---------------------------------------------------------------------------------


def test_a_drafter_is_exported_for_fewer_tokens_than_it_was_taught(tiny_target: Target, tmp_path: Path) -> None:
    """Fewer masks are laid out otherwise, and sums of another shape round otherwise: that alone is no broken export."""
    for depths in (3, 4, 6):
        for length in range(1, depths + 1):
            out = export(pard(tiny_target, depths, ratio=0.7), tiny_target, "vllm", tmp_path / f"{depths}-{length}", length)
            assert json.loads((out / "config.json").read_text())["draftsmith"]["draft_length"] == length


@pytest.mark.parametrize("engine", [name for name, engine in ENGINES.items() if "pard" in engine.layouts])
@pytest.mark.parametrize("case", ["pard", "pard-lora"])
def test_the_export_is_an_lm_that_names_its_mask(engine: str, case: str, tiny_target: Target, tmp_path: Path) -> None:
    head = make_head(tiny_target, case)
    out = export(head, tiny_target, engine, tmp_path / "out", draft_length=4)
    config = json.loads((out / "config.json").read_text())
    wanted = {"architectures": ["LlamaForCausalLM"], "pard_token": MASK, "spd_type": "pard", "vocab_size": 128}
    assert config | wanted == config
    lm: Any = AutoModelForCausalLM.from_pretrained(out)
    again, ids = import_head(out, tiny_target), random_ids(1, 20)
    assert again.kind == "pard" and again.config.depths == 4 and again.options.ratio == 1.0
    for d, (ours, theirs) in enumerate(
        zip(all_depths(head, ids, tiny_target), all_depths(again, ids, tiny_target), strict=True)
    ):
        torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
        sequence = torch.cat([ids[:, :2], torch.full((1, d), MASK)], 1)
        torch.testing.assert_close(theirs.logits[0], lm(sequence).logits[0, -1], atol=1e-4, rtol=1e-4)


def published(directory: Path, **changes: Any) -> Path:
    """A directory as AMD publishes them: a bfloat16 Llama, tied, its config as transformers 4 wrote it."""
    lm: Any = random_lm(LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True), seed=5)
    lm.to(torch.bfloat16).save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": None, "torch_dtype": config.pop("dtype")}
    config |= {"pard_token": 120, "spd_type": "pard"} | changes
    (directory / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "gone"}))
    return directory


def test_a_published_drafter_is_read_and_written_again_byte_for_byte(tiny_target: Target, tmp_path: Path) -> None:
    directory = published(tmp_path / "published")
    head = import_head(directory, tiny_target)
    assert (head.kind, head.config.depths, head.config.layer["pard_token"]) == ("pard", 8, 120)
    assert (
        generate(tiny_target, head, [5, 6, 7], chain(8), 12).tokens
        == generate(tiny_target, None, [5, 6, 7], chain(1), 12).tokens
    )
    again = export(head, tiny_target, "vllm", tmp_path / "again", draft_length=8)
    ours, theirs = (load_file(each / "model.safetensors") for each in (again, directory))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert json.loads((again / "config.json").read_text())["pard_token"] == 120


def test_a_published_drafter_is_a_start(
    tiny_target: Target, tmp_path: Path, tiny_tokenizer_factory: Callable[..., Any]
) -> None:
    """As options.model it keeps its mask token, in float32."""
    directory = published(tmp_path / "published")
    tiny_tokenizer_factory().save_pretrained(directory)
    head = pard(tiny_target, model=str(directory), layers=None, mask_token=None)
    assert head.config.layer["pard_token"] == 120 and head.config.layer["num_hidden_layers"] == 4
    assert {parameter.dtype for parameter in head.parameters()} == {torch.float32}
    head.save(tmp_path)
    assert load_head(tmp_path).config == head.config


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"pard_token": "gone"}, "has pard_token None"), ({"pard_token": 128}, "has pard_token 128")],
)
def test_an_import_without_a_mask_token_is_refused(changes: Any, said: str, tiny_target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        import_head(published(tmp_path, **changes), tiny_target, "pard")
