"""How much of the bare target's speed an extraction keeps, and what its store takes.

    python scripts/bench_extract.py [--rounds 5] [--tokens 4000] [--threads 2] [--out docs/results/extract.json]

Every round runs the bare target over ready-made batches and then a whole extraction of the very same batches into each dtype,
in rotating order: planning, checksums, packing, writing and syncing the files included. The ratio of a round is the
extraction's tokens per second over the bare target's of that round.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from draftsmith.console import Progress
from draftsmith.data.batches import collate
from draftsmith.data.chat import Encoded
from draftsmith.data.extract import batches, extract, plan
from draftsmith.data.features import PAD, lengths_of
from draftsmith.data.manifest import Identity, Manifest
from draftsmith.fetch import DEMO_TARGET
from draftsmith.heads.kinds import KINDS
from draftsmith.target import Target

BARE = "bare target"
SHARD_TOKENS = 1000  # several shards even of so few tokens: but for the last one, they are written while the target runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=DEMO_TARGET)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("docs/results/extract.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    target = Target.load(arguments.target, "float32")
    taps = KINDS["eagle3"].default_taps(target)
    examples = rows(arguments.tokens, target.vocab_size)
    lengths = lengths_of(examples)
    manifests = {name: manifest(Identity.of(target, examples, taps, name)) for name in ("bfloat16", "int8")}
    cuts = [
        [batch for shard in plan(lengths, own) for batch in batches(shard, lengths, arguments.batch_tokens)]
        for own in manifests.values()
    ]
    assert cuts[0] == cuts[1], "both dtypes must run the same batches: choose other --tokens"
    ready = [collate(examples, batch, PAD, None).ids for batch in cuts[0]]
    seconds: dict[str, list[float]] = {name: [] for name in (BARE, *manifests)}
    sizes: dict[str, float] = {}
    target.features(ready[0], taps)  # warm up
    names = list(seconds)
    with Progress("measuring", arguments.rounds * len(names)) as bar, tempfile.TemporaryDirectory() as place:
        for number in range(arguments.rounds):
            for name in names[number % 3 :] + names[: number % 3]:
                began = time.perf_counter()
                if name == BARE:
                    for ids in ready:
                        target.features(ids, taps)
                else:
                    report = extract(
                        target, examples, taps, Path(place) / "store", name, batch_tokens=arguments.batch_tokens,
                        shard_bytes=manifests[name].shard_bytes or 0, force=True,
                    )  # fmt: skip
                    sizes[name] = report["bytes"] / report["tokens"]
                seconds[name].append(time.perf_counter() - began)
                bar.advance()
    tokens = int(lengths.sum())
    ratios = {name: [bare / own for bare, own in zip(seconds[BARE], seconds[name], strict=True)] for name in sizes}
    result = {
        "command": "python " + " ".join(sys.argv),
        "target": arguments.target,
        "machine": {"threads": arguments.threads, "cores": os.cpu_count(), "load_after": os.getloadavg()[0]},
        "rows": len(examples),
        "tokens": tokens,
        "batches": len(ready),
        "padding": 1 - tokens / sum(ids.numel() for ids in ready),
        "seconds": seconds,
        "tokens_per_s": {name: tokens / statistics.median(own) for name, own in seconds.items()},
        "ratios": ratios,
        "ratio": {name: statistics.median(own) for name, own in ratios.items()},
        "bytes_per_token": sizes,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def manifest(identity: Identity) -> Manifest:
    return Manifest(identity=identity, shard_bytes=int(SHARD_TOKENS * identity.bytes_per_token))


def rows(tokens: int, vocab_size: int) -> list[Encoded]:
    """Random rows of 50 to 350 ids, ``tokens`` in all."""
    draw = np.random.default_rng(0)
    made: list[Encoded] = []
    while tokens > 0:
        length = min(tokens, int(draw.integers(50, 350)))
        made.append(Encoded(draw.integers(0, vocab_size, length).astype(np.int32), np.ones(length, bool)))
        tokens -= length
    return made


if __name__ == "__main__":
    main()
