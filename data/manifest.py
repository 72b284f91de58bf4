"""What a feature store was made from, and what it holds: manifest.json."""

import hashlib
import json
import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import BaseModel

from ..errors import UserError
from ..outputs import sync
from ..target import Target, whole
from .chat import Encoded
from .precision import DTYPES, bytes_per_token, group_size

FORMAT = 1
FILE = "manifest.json"
UNSEEN = "unseen"
SAMPLED = 64  # numbers of each weight that its digest reads


class StoredTarget(BaseModel, frozen=True):
    """The target that computed the states. ``weights`` is a digest of samples of them, as loaded in ``dtype``."""

    hidden_size: int
    vocab_size: int
    depth: int
    template: str
    fingerprint: str
    dtype: str
    weights: str

    @classmethod
    def of(cls, target: Target) -> Self:
        template = str(getattr(target.tokenizer, "chat_template", None))
        return cls(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            depth=target.depth,
            template=hashlib.sha256(template.encode()).hexdigest()[:16],
            fingerprint=target.fingerprint,
            dtype=str(target.dtype).removeprefix("torch."),
            weights=weights_digest(target),
        )


class StoredData(BaseModel, frozen=True):
    """The examples that were read: a digest of all ids and masks in order, and their counts."""

    examples: str
    rows: int
    tokens: int
    supervised_tokens: int

    @classmethod
    def of(cls, examples: Sequence[Encoded]) -> Self:
        digest, tokens, supervised = hashlib.sha256(), 0, 0
        for example in examples:
            digest.update(len(example.ids).to_bytes(8, "little"))
            digest.update(np.asarray(example.ids, np.int32).tobytes() + np.asarray(example.mask, bool).tobytes())
            tokens += len(example.ids)
            supervised += int(np.sum(example.mask))
        return cls(examples=digest.hexdigest(), rows=len(examples), tokens=tokens, supervised_tokens=supervised)


class Identity(BaseModel, frozen=True):
    """All that decides what a store's rows are. Two stores of one identity hold the same rows, or parts of them."""

    target: StoredTarget
    taps: tuple[int, ...]
    dtype: Literal["float32", "bfloat16", "float16", "int8"]
    group: int
    data: StoredData

    @classmethod
    def of(cls, target: Target, examples: Sequence[Encoded], taps: Sequence[int], dtype: str) -> Self:
        """Raises UserError for taps outside the target and for a dtype that no store has."""
        target.check_taps(taps)
        if dtype not in DTYPES:
            raise UserError(f"dtype {dtype!r} is none that a store keeps: choose {', '.join(DTYPES)}.")
        return cls(
            target=StoredTarget.of(target),
            taps=tuple(taps),
            dtype=dtype,  # type: ignore[arg-type]
            group=group_size(target.hidden_size),
            data=StoredData.of(examples),
        )

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    @property
    def bytes_per_token(self) -> float:
        """Of ids, mask and states."""
        return 5 + bytes_per_token(self.target.hidden_size, len(self.taps), self.dtype)


class Part(BaseModel, frozen=True):
    """Rows ``index``, ``index + of``, ``index + 2 of``, … of the data; part 0 of 1 is all of it."""

    index: int = 0
    of: int = 1

    def rows(self, total: int) -> np.ndarray:
        return np.arange(self.index, total, self.of)


WHOLE = Part()


class ShardEntry(BaseModel, frozen=True):
    """A file of the store. ``sha256`` is of its tensors (names, dtypes, shapes, bytes), as its own header states it."""

    file: str
    rows: int
    tokens: int
    bytes: int
    sha256: str


def own_version() -> str:
    try:
        return version("draftsmith")
    except PackageNotFoundError:  # a checkout that is imported without being installed
        return "unknown"


class Manifest(BaseModel):
    """A store's manifest.json. ``shards`` is None as long as the store grows; ``about`` is told, and never compared.

    ``shard_bytes``: where rows were cut into shards; None in a store that grew row by row.
    """

    format: int = FORMAT
    draftsmith: str = own_version()
    identity: Identity
    part: Part = WHOLE
    shard_bytes: int | None = None
    about: dict[str, Any] = {}
    shards: list[ShardEntry] | None = None

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Raises UserError where the directory or its manifest is missing, damaged or of another format."""
        if not directory.is_dir():
            raise UserError(f"{directory} is no directory: make a feature store with draftsmith data extract.")
        file = directory / FILE
        if not file.exists():
            raise UserError(
                f"{directory} has no {FILE}, so it is no whole feature store: make one with draftsmith data extract."
            )
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
            found = document["format"]
            if found == FORMAT:
                return cls.model_validate(document)
        except (OSError, ValueError, KeyError, TypeError) as error:
            first_line = str(error).splitlines()[0]
            raise UserError(f"{file} is damaged ({first_line}): restore a copy, or extract the states again.") from error
        raise UserError(f"{file} has format {found!r}, and this draftsmith reads format {FORMAT}: extract the states again.")

    def write(self, directory: Path) -> None:
        """Put it into the directory in one step, on the disk when this returns."""
        partial = directory / f".{FILE}.{os.getpid()}"  # several processes may make one store
        with open(partial, "w", encoding="utf-8") as file:
            file.write(self.model_dump_json(indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.rename(directory / FILE)
        sync(directory)


def target_differences(there: StoredTarget, here: StoredTarget) -> list[str]:
    """What tells two targets apart, in words. Weights are compared where both were seen, in one dtype."""
    comparable = there.dtype == here.dtype and UNSEEN not in (there.weights, here.weights)
    return differences(there, here if comparable else here.model_copy(update={"dtype": there.dtype, "weights": there.weights}))


def differences(there: BaseModel, here: BaseModel) -> list[str]:
    """Each field in which two models of one class differ, in words."""
    found = []
    for name in type(there).model_fields:
        a, b = getattr(there, name), getattr(here, name)
        if isinstance(a, BaseModel):
            found += differences(a, b)
        elif a != b:
            found.append(f"{name.replace('_', ' ')} {_short(a)} there and {_short(b)} here")
    return found


def _short(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return text if len(text) <= 16 else text[:8] + "…"


@torch.no_grad()
def weights_digest(target: Target) -> str:
    """A digest of numbers taken from all over every weight: a fine-tuned copy of a target differs, whatever its config says.

    UNSEEN where weights lie on the disk until they are used.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(target.model.named_parameters()):
        if weight.is_meta:
            return UNSEEN
        flat = whole(weight.detach()).flatten()
        sample = flat[:: max(1, len(flat) // SAMPLED)][:SAMPLED].float().cpu().numpy()
        digest.update(name.encode() + sample.tobytes())
    return digest.hexdigest()[:16]
