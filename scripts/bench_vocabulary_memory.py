"""How a training step's memory grows with the vocabulary: logits a piece of the rows at a time, and all rows at once.

    python scripts/bench_vocabulary_memory.py

Every point is a process of its own. It makes a random Llama of four layers and an EAGLE-3 head for it over the whole
vocabulary, and takes optimizer steps on one batch: forward, loss, backward, clip, AdamW. What stands after the first step does
not depend on the logits: target, head, gradients, optimizer and the program itself (the chunk-free part). In the second step
the peak is read. What is compared is how much either grows from the smallest vocabulary to the largest.
"""

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.console import note
from draftsmith.data.features import FeatureBatch
from draftsmith.heads.base import DraftHead
from draftsmith.heads.kinds import KINDS
from draftsmith.target import Target
from draftsmith.train.objectives import Objective
from draftsmith.train.step import Judge

VOCABULARIES = [8192 << i for i in range(6)]  # 8k to 256k
WIDTH, LAYERS, DEPTHS = 576, 4, 3  # the width of SmolLM2-135M
LINES, LENGTH = 2, 96
LIMIT = 1.3  # the peak may grow so many times as much as the chunk-free part


def step(head: DraftHead, target: Target, batch: FeatureBatch, optimizer: torch.optim.Optimizer, chunk: int | None) -> None:
    """One whole optimizer step as a run takes it; gradients stay until the next."""
    optimizer.zero_grad()
    rows = head.taught(batch.ids, batch.mask, 0)
    judge = Judge(batch, target, Objective(loss="lk"), torch.stack([own.sum() for own in rows]), chunk)
    loss, _ = head(judge, batch.ids, rows, batch.features, target, None)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
    optimizer.step()


def resident(key: str) -> int:
    """Bytes of this process by /proc: VmRSS now, VmHWM at its highest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def point(vocabulary: int, chunk: int | None) -> dict[str, Any]:
    """The chunk-free part and the peak of one step, in this process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=LENGTH, tie_word_embeddings=False,
    )  # fmt: skip
    target = Target(LlamaForCausalLM(config), None, "random")
    kind = KINDS["eagle3"]
    head = kind.create(target, kind.Options(), None, DEPTHS, torch.arange(vocabulary)).train()  # type: ignore[call-arg]
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-4, fused=True)  # as a run's
    ids = torch.randint(vocabulary, (LINES, LENGTH))
    features = target.features(ids, head.config.taps)
    batch = FeatureBatch(ids, torch.ones_like(ids, dtype=torch.bool), features, None, ids.numel())
    step(head, target, batch, optimizer, chunk)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    free = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    step(head, target, batch, optimizer, chunk)
    return {"vocabulary": vocabulary, "chunk_free_MB": free / 1e6, "peak_MB": resident("VmHWM") / 1e6}


def measured(vocabulary: int, rows: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--point", str(vocabulary), "--rows", rows], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        note(f"vocabulary {vocabulary}, {rows}: the process ended with {done.returncode}, most likely out of memory")
        return {"vocabulary": vocabulary, "chunk_free_MB": None, "peak_MB": None}
    found = json.loads(done.stdout.splitlines()[-1])
    note(f"vocabulary {vocabulary}, {rows}: peak {found['peak_MB']:.0f} MB, of it chunk-free {found['chunk_free_MB']:.0f} MB")
    return found


def growth(points: list[dict[str, Any]]) -> dict[str, float]:
    """By how much peak and chunk-free part grow from the first vocabulary to the last."""
    peak, free = (points[-1][key] - points[0][key] for key in ("peak_MB", "chunk_free_MB"))
    return {"peak_MB": peak, "chunk_free_MB": free, "ratio": peak / free}


def draw(found: dict[str, Any], out: Path) -> None:
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for rows, label in (("all", "all rows at once"), ("pieces", "a piece of the rows at a time")):
        points = [each for each in found[rows] if each["peak_MB"]]
        axes.plot([each["vocabulary"] / 1024 for each in points], [each["peak_MB"] / 1e3 for each in points], "o-", label=label)
    pieces = found["pieces"]
    axes.plot(
        [each["vocabulary"] / 1024 for each in pieces],
        [each["chunk_free_MB"] / 1e3 for each in pieces],
        "k--",
        label="without logits: target, head, gradients, optimizer",
    )
    axes.set(xlabel="vocabulary", ylabel="peak resident memory (GB)", xscale="log", ylim=(0, None))
    axes.set_xticks([each["vocabulary"] / 1024 for each in pieces], [f"{each['vocabulary'] // 1024}k" for each in pieces])
    axes.minorticks_off()
    axes.legend(frameon=False)
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results/memory.json"), help="a picture is drawn beside it")
    parser.add_argument("--point", type=int, help="measure this vocabulary alone, in this process")
    parser.add_argument("--rows", choices=["pieces", "all"], default="pieces")
    options = parser.parse_args()
    if options.point:
        print(json.dumps(point(options.point, None if options.rows == "pieces" else LINES * LENGTH)))
        return
    found: dict[str, Any] = {
        "command": "python scripts/bench_vocabulary_memory.py",
        "width": WIDTH, "layers": LAYERS, "depths": DEPTHS, "lines": LINES, "length": LENGTH,
        "threads": torch.get_num_threads(), "torch": torch.__version__,
    }  # fmt: skip
    for rows in ("pieces", "all"):
        found[rows] = [measured(vocabulary, rows) for vocabulary in VOCABULARIES]
    found["growth"] = growth(found["pieces"])
    found["limit"], found["within"] = LIMIT, found["growth"]["ratio"] < LIMIT
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    draw(found, options.out.with_suffix(".png"))
    print(json.dumps(found["growth"] | {"within": found["within"]}, indent=1))


if __name__ == "__main__":
    main()
