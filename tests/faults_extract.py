"""Kill an extraction at random moments and start it again: what comes out must be what an undisturbed one writes."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from killing import kill_until_done
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.data.chat import Encoded
from draftsmith.data.extract import extract
from draftsmith.data.store import Store
from draftsmith.data.upkeep import verify
from draftsmith.target import Target

ROWS = 600


def killed_extraction(place: Path, kills: int, seed: int) -> dict[str, Any]:
    """Extract into ``place``/calm without and into ``place``/killed with ``kills``, drawn from ``seed``.

    Returns {kills: that hit, rows, rows_lost, rows_doubled, sound, bytes_equal}.
    """
    began = time.perf_counter()
    job(place / "calm")
    longest = (time.perf_counter() - began) * 1.6 / kills  # all lives together are shorter than the job
    hits = kill_until_done(partial(job, place / "killed"), kills, seed, longest)
    calm, killed = Store(place / "calm"), Store(place / "killed")
    findings = verify(place / "killed")
    return {
        "kills": hits,
        "rows": len(killed),
        "rows_lost": len(calm) - len(killed),
        "rows_doubled": sum(len(shard.rows) for shard in killed.shards) - len(killed),
        "sound": findings.sound and not findings.strangers,
        "bytes_equal": contents(place / "calm") == contents(place / "killed"),
    }


def job(out: Path) -> None:
    """Extract random rows with a random target, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    target = Target(LlamaForCausalLM(config).float(), None, "random")
    draw = np.random.default_rng(0)
    lengths = draw.integers(100, 400, ROWS)
    examples = [Encoded(draw.integers(0, 128, n).astype(np.int32), draw.random(n) < 0.5) for n in lengths]
    extract(target, examples, (1, 2, 4), out, "float32", batch_tokens=4096, shard_bytes=2**20)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}
