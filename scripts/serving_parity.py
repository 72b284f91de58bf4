"""Does a serving engine accept exactly what our verifier accepts? `make parity` asks vLLM on a CPU, in its own environment.

Heads are over-fitted on the target's own answers to the prompts (good) and spoilt with noise on their weights (middling,
bad), exported, and decoded by both sides: float32, greedy, the same prompts and draft length. N-gram look-up needs no head.
The number of drafts and of drafted tokens, the accepted count at every position and the text must be equal, prompt by
prompt; only a near-tie of the target, shown with its margin, excuses a prompt. Leaves runs/parity/report.json; exits with
status 1 unless everything is equal.
"""

import argparse
import copy
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config, Qwen2ForCausalLM

from draftsmith.console import Progress, note
from draftsmith.data.chat import Encoded
from draftsmith.data.features import Memory, OnlineFeatures
from draftsmith.data.vocab import choose, count_tokens, special_ids
from draftsmith.errors import UserError
from draftsmith.eval.harness import NEAR_TIE, divergence
from draftsmith.eval.measures import drafts as drafts_of
from draftsmith.eval.ngram import NGram
from draftsmith.eval.prompts import read_prompts
from draftsmith.eval.proposers import HeadProposer
from draftsmith.eval.tree import chain
from draftsmith.eval.verifier import Generation, Request
from draftsmith.eval.verifier import decode as decode_all
from draftsmith.fetch import DEMO_TARGET, local_path
from draftsmith.heads.base import DraftHead
from draftsmith.heads.engines.registry import ENGINES, export, served
from draftsmith.heads.kinds import KINDS, load_head
from draftsmith.heads.medusa import MedusaHead, MedusaOptions
from draftsmith.target import Target
from draftsmith.train.objectives import Objective
from draftsmith.train.step import judged

ROOT = Path(__file__).resolve().parent.parent
LONGEST_PROMPT = 96  # tokens: the engine's float32 decoding on a CPU is slow
DRAFT_VOCABULARY = 2048


@dataclass(frozen=True)
class Fit:
    """How a head is over-fitted: its options, the chain drafted, and how it is spoilt (noise in standard deviations)."""

    kind: str
    length: int
    steps: int
    rate: float
    middling: float
    bad: float
    options: dict[str, Any] = field(default_factory=dict)
    depths: int | None = None  # None: as many as are drafted
    whole: bool = False  # the target's whole vocabulary


FITS = {
    "eagle3": Fit("eagle3", 5, 30, 1e-3, 0.45, 0.7),
    "eagle3-2layers": Fit("eagle3", 5, 25, 1e-3, 0.45, 0.7, {"layers": 2}),
    "eagle": Fit("eagle", 5, 15, 1e-3, 0.3, 0.6, {"feature_noise": 0.0}, depths=3, whole=True),
    "peagle": Fit("peagle", 4, 30, 1e-3, 0.3, 0.6),
    "medusa": Fit("medusa", 4, 80, 2e-3, 0.75, 1.3),
    "draft_model": Fit("draft_model", 4, 10, 1e-4, 0.1, 0.3, {"layers": 4}, depths=1, whole=True),
    "pard": Fit("pard", 4, 25, 5e-4, 0.15, 0.5, {"layers": 4}, whole=True),
    "dflash": Fit("dflash", 4, 40, 1e-3, 0.3, 0.6, {"layers": 1}),  # vLLM's CPU build gives all layers the first one's k_norm
    "mtp": Fit("mtp", 4, 40, 2e-3, 0.1, 0.3, {"form": "mimo"}, whole=True),
}
PLANNED = [  # name, fit, quality, engine
    *((f"eagle3/{quality}", "eagle3", quality, "vllm") for quality in ("good", "middling", "bad")),
    ("eagle3-speculators/middling", "eagle3", "middling", "speculators"),
    ("eagle3-2layers/middling", "eagle3-2layers", "middling", "vllm"),
    ("eagle/middling", "eagle", "middling", "vllm"),
    ("peagle/middling", "peagle", "middling", "vllm"),
    ("peagle-speculators/middling", "peagle", "middling", "speculators"),
    *((f"medusa/{quality}", "medusa", quality, "vllm") for quality in ("good", "middling", "bad")),
    ("medusa-shared/good", "medusa-shared", "good", "vllm"),
    ("draft_model/middling", "draft_model", "middling", "vllm"),
    ("pard/middling", "pard", "middling", "vllm"),
    ("dflash/middling", "dflash", "middling", "vllm"),
    ("dflash-speculators/middling", "dflash", "middling", "speculators"),
    ("mtp/good", "mtp", "good", "vllm"),
]

NGRAM = (4, 4, 1)  # drafted tokens, and how many must match at most and at least


@dataclass
class Case:
    """One proposer on both sides, with its target. ``engine`` is the layout of a head; ``length`` the chain that is drafted."""

    name: str
    proposer: DraftHead | NGram
    engine: str
    length: int
    target: Target


def main() -> int:
    arguments = parse()
    threads = os.cpu_count() or 2
    torch.set_num_threads(min(arguments.threads, threads))
    target = Target.load(arguments.target, dtype="float32")
    prompts = read_ids(target, arguments.prompts_file, arguments.prompts)
    answers = greedy_answers(target, prompts, arguments.max_new)
    cases = make_cases(arguments, target, prompts, answers)
    torch.set_num_threads(1)  # from here on the engine runs beside us
    report: dict[str, Any] = {"heads": {}, "engine": {"name": "vllm", "version": None}}
    report |= {"target": target.name, "prompts": len(prompts), "max_new": arguments.max_new, "dtype": "float32"}
    arguments.out.mkdir(parents=True, exist_ok=True)
    for case in cases:
        note(f"{case.name}: {len(prompts)} prompts, chain of {case.length}, {case.engine} layout")
        engine, ours = both(case, prompts, arguments)
        report["heads"][case.name] = compare(case, prompts, ours, engine)
        report["engine"]["version"] = engine["version"]
        (arguments.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    show(report)
    return 0 if all(entry["equal"] for entry in report["heads"].values()) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare our acceptance counts with vLLM's.")
    parser.add_argument(
        "--heads", default="all", help="cases to run, by the beginning of their names, with commas (default: all)"
    )
    parser.add_argument("--head", type=Path, action="append", default=[], help="a trained head's directory, as one more case")
    parser.add_argument("--target", default=DEMO_TARGET)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompts-file", type=Path, default=ROOT / "recipes/demo/heldout.jsonl")
    parser.add_argument("--max-new", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1, help="threads of the training; one makes the same heads anywhere")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/parity")
    parser.add_argument("--vllm-python", type=Path, default=ROOT / ".venv-vllm/bin/python")
    arguments = parser.parse_args()
    if not arguments.vllm_python.exists():
        raise UserError(f"{arguments.vllm_python} does not exist: run make .venv-vllm/ready, or name --vllm-python.")
    return arguments


def read_ids(target: Target, path: Path, count: int) -> list[list[int]]:
    """The first ``count`` prompts of the file that are short enough."""
    found = [ids for prompt in read_prompts(path) if len(ids := prompt.ids(target)) <= LONGEST_PROMPT]
    if len(found) < count:
        raise UserError(f"{path} holds {len(found)} prompts of at most {LONGEST_PROMPT} tokens: pass --prompts {len(found)}.")
    return found[:count]


@torch.inference_mode()
def greedy_answers(target: Target, prompts: list[list[int]], max_new: int) -> list[list[int]]:
    """The target's answers, in one left-padded batch: to train on, not to compare with."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    seen = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    written = target.model.generate(
        input_ids=ids, attention_mask=seen, max_new_tokens=max_new, do_sample=False, pad_token_id=next(iter(target.eos_ids))
    )[:, width:]
    answers = []
    for row in written.tolist():
        end = next((i for i, token in enumerate(row) if token in target.eos_ids), len(row) - 1)
        answers.append(row[: end + 1])
    return answers


# -- the heads -----------------------------------------------------------------------------------------------------


def make_cases(arguments: argparse.Namespace, target: Target, prompts: list[list[int]], answers: list[list[int]]) -> list[Case]:
    """The wanted cases. A head is only trained when a case asks for it."""
    examples = answered(prompts, answers)
    wanted = arguments.heads.split(",")
    good: dict[str, DraftHead] = {}
    targets: dict[str, Target] = {}

    def made(name: str) -> DraftHead:
        if name not in good:
            if name == "medusa-shared":
                good[name] = share_lm_head(made("medusa"), target)
            elif name == "mtp":
                texts = answered(prompts, greedy_answers(targets["mtp"], prompts, arguments.max_new))
                good[name] = fit(FITS[name], targets["mtp"], texts)
            else:
                good[name] = fit(FITS[name], target, examples)
        return good[name]

    cases = []
    for name, source, quality, engine in PLANNED:
        if wanted == ["all"] or any(name.startswith(beginning) for beginning in wanted):
            recipe = FITS[source.removesuffix("-shared")]
            if source == "mtp":
                targets[source] = mtp_target(target, arguments.out / "mtp-target")
            spoilt = made(source) if quality == "good" else spoil(made(source), getattr(recipe, quality))
            cases.append(Case(name, spoilt, engine, recipe.length, targets.get(source, target)))
    if wanted == ["all"] or any("ngram".startswith(beginning) for beginning in wanted):
        cases.append(Case("ngram", NGram(*NGRAM), "-", NGRAM[0], target))
    for directory in arguments.head:
        head = load_head(directory)
        length = min(head.deepest or 5, 5)
        run = directory.resolve().parent.name  # a head stands in RUN/head
        cases += [Case(f"{head.kind}/{run}-{engine}", head, engine, length, target) for engine in served(head.kind)]
    return cases


def answered(prompts: list[list[int]], answers: list[list[int]]) -> list[Encoded]:
    """Prompts with their answers, the answers supervised."""
    return [
        Encoded(np.array(prompt + answer, np.int32), np.array([False] * len(prompt) + [True] * len(answer)))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def mtp_target(like: Target, folder: Path) -> Target:
    """A small random Qwen2 with the tokenizer of ``like``: of a family whose multi-token prediction vLLM serves (as MiMo)."""
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    ends = {"bos_token_id": like.config.bos_token_id, "eos_token_id": like.config.eos_token_id}
    config = Qwen2Config(vocab_size=like.vocab_size, num_key_value_heads=2, max_position_embeddings=512, **sizes, **ends)
    model = Qwen2ForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    like.tokenizer.save_pretrained(folder)
    return Target.load(str(folder), dtype="float32")


def share_lm_head(head: DraftHead, target: Target) -> DraftHead:
    """The same blocks under the target's one lm_head, over its whole vocabulary."""
    options = MedusaOptions(lm_head="shared")
    shared = MedusaHead.create(target, options, None, head.config.depths, torch.arange(target.vocab_size))
    shared.blocks.load_state_dict(head.get_submodule("blocks").state_dict())
    return shared.eval()


def draft_vocabulary(target: Target, examples: list[Encoded]) -> torch.Tensor:
    counts = count_tokens(examples, target.vocab_size)
    size = min(DRAFT_VOCABULARY, target.vocab_size)
    return choose(counts, size, special_ids(target.tokenizer, target.eos_ids)).target_ids


def fit(recipe: Fit, target: Target, examples: list[Encoded]) -> DraftHead:
    """Over-fit a head on the answers' own tokens: AdamW, eight answers at a time, on remembered features.

    A Medusa head's own lm_heads, of the target's rows, stay as they are: only its blocks learn.
    """
    torch.manual_seed(0)
    kind = KINDS[recipe.kind]
    ids = torch.arange(target.vocab_size) if recipe.whole else draft_vocabulary(target, examples)
    options = kind.Options.model_validate(recipe.options)
    head = kind.create(target, options, None, recipe.depths or recipe.length, ids)
    if isinstance(head, MedusaHead):
        head.lm_heads.requires_grad_(False)
    source = OnlineFeatures(target, examples, head.config.taps, Memory())
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=recipe.rate, weight_decay=0.0)
    batches = [list(range(first, min(first + 8, len(examples)))) for first in range(0, len(examples), 8)]
    head.train()
    with Progress(f"over-fitting {head.kind}", recipe.steps) as bar:
        for step in range(recipe.steps):
            batch = source.batch(batches[step % len(batches)])
            rows = head.taught(batch.ids, batch.mask, step)
            loss, _ = judged(head, batch, target, Objective("ce", depth_decay=1.0), rows)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            bar.advance(1, f"loss {loss.item():.2f}")
    return head.eval()


@torch.no_grad()
def spoil(head: DraftHead, scale: float) -> DraftHead:
    """A copy with seeded noise on every matrix, in units of that matrix's own standard deviation."""
    head = copy.deepcopy(head)
    generator = torch.Generator().manual_seed(0)
    for parameter in head.parameters():
        if parameter.ndim == 2:
            parameter += scale * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return head


# -- both sides ----------------------------------------------------------------------------------------------------


def both(case: Case, prompts: list[list[int]], arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Generation]]:
    """The engine's result and ours, decoded at the same time on one core each."""
    folder = arguments.out / "cases" / case.name.replace("/", "-")
    folder.mkdir(parents=True, exist_ok=True)
    job = {
        **(by_head(case, case.proposer, folder) if isinstance(case.proposer, DraftHead) else by_ngram(case, case.proposer)),
        "draft_length": case.length,
        "prompts": prompts,
        "max_tokens": arguments.max_new,
    }
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "result.json").unlink(missing_ok=True)
    with open(folder / "engine.log", "w", encoding="utf-8") as log:
        engine = subprocess.Popen(
            [
                str(arguments.vllm_python),
                str(ROOT / "scripts/vllm_counts.py"),
                str(folder / "job.json"),
                str(folder / "result.json"),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**engine_environment(), "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        )
        try:
            ours = decode(case, prompts, arguments.max_new)
            status = engine.wait()
        finally:
            engine.kill()
    if status:
        raise UserError(f"the engine failed on {case.name}: its last words are in {folder / 'engine.log'}.")
    return json.loads((folder / "result.json").read_text()), ours


def by_head(case: Case, head: DraftHead, folder: Path) -> dict[str, Any]:
    """What the engine is told of a head, which is exported for it."""
    exported = export(head, case.target, case.engine, folder / "head", case.length, force=True)
    layout = ENGINES[case.engine].layouts[head.kind]
    # a head that is written back into its target's checkpoint is served as that
    target = Path(local_path(case.target.name)) if layout.file else exported.resolve()
    return {"target": str(target), "method": layout.method, "flags": {"model": str(exported.resolve()), **layout.flags}}


def by_ngram(case: Case, proposer: NGram) -> dict[str, Any]:
    """The same for n-gram look-up."""
    flags = {"prompt_lookup_max": proposer.sizes[-1], "prompt_lookup_min": proposer.sizes[0]}
    return {"target": str(Path(local_path(case.target.name))), "method": "ngram", "flags": flags}


def engine_environment() -> dict[str, str]:
    """Ours without what would lead the engine's Python to our packages."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}


def decode(case: Case, prompts: list[list[int]], max_new: int) -> list[Generation]:
    drafter, results = case.proposer, []
    proposer = HeadProposer(drafter, chain(case.length)) if isinstance(drafter, DraftHead) else drafter
    with Progress("decoding", len(prompts)) as bar:
        for ids in prompts:
            results += decode_all(case.target, proposer, [Request(ids, max_new)]).generations
            bar.advance()
    return results


def compare(case: Case, prompts: list[list[int]], ours: list[Generation], engine: dict[str, Any]) -> dict[str, Any]:
    """One entry of the report's ``heads``. Prompts whose texts part at a near-tie are named and left out of the counts."""
    kept, ties, unequal = [], [], []
    texts_equal = 0
    for i, (own, theirs) in enumerate(zip(ours, engine["prompts"], strict=True)):
        same_text = own.tokens == theirs["tokens"]
        texts_equal += same_text
        counts = (drafts_of([own]), own.drafted, accepted(own, case.length))
        wanted = (theirs["drafts"], theirs["proposed"], theirs["accepted"])
        if not same_text and (tie := divergence(case.target, prompts[i], own.tokens, theirs["tokens"]))["margin"] < NEAR_TIE:
            ties.append({"prompt": i, **tie})
            continue
        kept.append(i)
        if not same_text or counts != wanted:
            unequal.append({"prompt": i, "ours": counts, "engine": wanted, "texts_equal": same_text})
    mine = total([accepted(ours[i], case.length) for i in kept], case.length)
    other = total([engine["prompts"][i]["accepted"] for i in kept], case.length)
    drafts = drafts_of([ours[i] for i in kept])
    engine_drafts = sum(engine["prompts"][i]["drafts"] for i in kept)
    pairs = [(drafts, engine_drafts), *zip(mine, other, strict=True)]
    return {
        "equal": not unequal,
        "drafts": drafts,
        "engine_drafts": engine_drafts,
        "drafted_tokens": sum(ours[i].drafted for i in kept),
        "engine_drafted_tokens": sum(engine["prompts"][i]["proposed"] for i in kept),
        "ours": mine,
        "engine": other,
        "max_rel_diff": max(abs(a - b) / max(b, 1) for a, b in pairs),
        "texts_equal": texts_equal,
        "texts_total": len(prompts),
        "layout": case.engine,
        "draft_length": case.length,
        "near_ties": ties,
        "unequal": unequal,
        "seconds": {"engine": engine["seconds"], "engine_load": engine["load_seconds"]},
    }


def accepted(generation: Generation, length: int) -> list[int]:
    """How many drafts were accepted at position 1, 2, ..."""
    return [sum(a > position for a in generation.accepted) for position in range(length)]


def total(rows: list[list[int]], length: int) -> list[int]:
    return [sum(row[position] for row in rows) for position in range(length)]


def show(report: dict[str, Any]) -> None:
    table = Table(title=f"vLLM {report['engine']['version']} and draftsmith: {report['prompts']} prompts, float32, greedy")
    for column in ("head", "layout", "drafts", "accepted at 1, 2, …", "engine's", "texts", "ties", ""):
        table.add_column(column, no_wrap=True)
    for name, entry in report["heads"].items():
        table.add_row(
            name,
            entry["layout"],
            f"{entry['drafts']}/{entry['engine_drafts']}",
            " ".join(map(str, entry["ours"])),
            " ".join(map(str, entry["engine"])),
            f"{entry['texts_equal']}/{entry['texts_total']}",
            str(len(entry["near_ties"])),
            "equal" if entry["equal"] else "differs",
        )
    Console(width=max(Console().width, 128)).print(table)


if __name__ == "__main__":
    start = time.perf_counter()
    try:
        status = main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    note(f"{time.perf_counter() - start:.0f} s")
    sys.exit(status)
