"""What data files become for a target: token ids and masks in a memory-mapped table, made once and found again.

Conversations are read into one Arrow file and tokenized through ``datasets``' map; both lie in the datasets cache
(HF_DATASETS_CACHE) under digests of all they were made from: the files' bytes, how they were read, tokenizer, chat template,
length limit and mask options.
"""

import hashlib
import json
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import datasets.config
import numpy as np
import pyarrow.compute
from datasets.arrow_writer import ArrowWriter

from ..errors import UserError
from ..outputs import new_directory
from .chat import NO_SUPERVISION, Encoded, EncodedRows, Refused, check_ids, encode, supervises
from .conversations import Conversation, Reading, read_conversations
from .records import local_files
from .tally import Tally
from .template import check_vocabulary

FORMAT = 1  # raise it whenever reading or encoding gives another result for the same input
RAW = datasets.Features({"conversation": datasets.Value("large_string"), "changed": datasets.Value("bool")})
ENCODED = datasets.Features(
    {
        "ids": datasets.LargeList(datasets.Value("int32")),
        "mask": datasets.LargeList(datasets.Value("bool")),
        "notes": datasets.List(datasets.Value("string")),
        **{name: datasets.Value("string") for name in ("file", "reason", "detail")},
        "row": datasets.Value("int64"),
    }
)


class Examples(EncodedRows):
    """Encoded conversations in input order, read from disk as they are asked for.

    ``lengths`` int32 [rows] in tokens; ``fingerprint`` changes with anything that could change an id or a mask. ``table``
    also holds the rows that were dropped, with file, row, notes and reason; ``kept`` are the places of the others in it.
    """

    def __init__(self, table: datasets.Dataset, kept: np.ndarray, fingerprint: str) -> None:
        self.table = table
        self.ids, self.mask = table.data.column("ids"), table.data.column("mask")
        self.kept = kept
        self.lengths = table_lengths(table)[kept]
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self.kept)

    def origin(self, row: int) -> str:
        """The file a row comes from and its place there."""
        place = int(self.kept[row])
        return f"{self.table.data.column('file')[place]}:{self.table.data.column('row')[place]}"

    def read(self, row: int) -> Encoded:
        place = int(self.kept[row])
        ids, mask = self.ids[place].values, self.mask[place].values
        return Encoded(ids.to_numpy(), mask.to_numpy(zero_copy_only=False))


def table_lengths(table: datasets.Dataset) -> np.ndarray:
    """The tokens of every row of a table of examples, dropped ones included: int32 [rows]."""
    lengths = pyarrow.compute.list_value_length(table.data.column("ids"))  # type: ignore[attr-defined]
    return lengths.to_numpy().astype(np.int32)


def prepare(
    sources: str | Sequence[str],
    tokenizer: Any,
    vocab_size: int,
    max_length: int | None,
    tally: Tally,
    reading: Reading | None = None,
    only_last: bool = False,
    workers: int = 1,
) -> Examples:
    """Read and encode every conversation of the sources; ``tally`` counts what became of the rows.

    ``vocab_size`` is the model's, which may be larger than the tokenizer's; conversations with tokens beyond it are dropped.
    ``only_last`` supervises the last assistant turn alone. ``workers``: processes that tokenize. Raises UserError for what
    the readers and the chat template refuse, and when nothing is left to learn from.
    """
    check_vocabulary(tokenizer, vocab_size)
    folder = read(sources, reading or Reading(), tally)
    own, raw = load(folder)
    key = digest(folder.name, tokenizer_digest(tokenizer), vocab_size, max_length, only_last)
    encoded = raw.map(
        encode_rows,
        batched=True,
        batch_size=64,
        num_proc=min(workers, max(len(raw), 1)) if workers > 1 else None,
        remove_columns=raw.column_names,
        features=ENCODED,
        fn_kwargs={"tokenizer": tokenizer, "vocab_size": vocab_size, "max_length": max_length, "only_last": only_last},
        cache_file_name=str(folder / f"ids-{key}.arrow"),
        new_fingerprint=key,
        load_from_cache_file=True,
        desc="tokenizing",
    )
    tally.take(own, folder / "rejects.jsonl")
    reasons = np.array(encoded["reason"][:], dtype=object)
    for place in np.flatnonzero(reasons != ""):
        row, conversation = encoded[int(place)], json.loads(raw[int(place)]["conversation"])
        value = {**conversation["about"], "messages": conversation["messages"]}
        tally.drop(row["file"], row["row"], row["reason"], row["detail"], value)
    for notes, changed, reason in zip(encoded["notes"][:], raw["changed"][:], reasons, strict=True):
        if reason:
            tally.changed_rows -= changed
        elif notes:
            tally.changed.update(notes)
            tally.changed_rows += not changed
    kept = np.flatnonzero(reasons == "")
    if not len(kept):
        named = ", ".join([sources] if isinstance(sources, str) else sources)
        mend = f"raise max_length (now {max_length}) or give conversations with longer answers"
        if tally.dropped["no assistant turn"] == tally.lost:
            mend = "let the target answer them first, with draftsmith data regenerate"
        raise UserError(f"no conversation of {named} is left to learn from ({tally.sentence()}): {mend}.")
    return Examples(encoded, kept, key)


def encode_rows(
    rows: dict[str, list], tokenizer: Any, vocab_size: int, max_length: int | None, only_last: bool
) -> dict[str, list]:
    """The batch of table rows of a batch of conversations."""
    out: dict[str, list] = {name: [] for name in ENCODED}
    for text in rows["conversation"]:
        conversation = Conversation(**json.loads(text))
        example, reason, detail = Encoded(np.zeros(0, np.int32), np.zeros(0, bool)), "", ""
        try:
            if all(message["role"] != "assistant" for message in conversation.messages):
                reason = "no assistant turn"
            else:
                example = encode(conversation, tokenizer, max_length, only_last)
                check_ids(example, vocab_size, f"{conversation.file}, row {conversation.row}")
                reason = "" if supervises(example.mask) else NO_SUPERVISION
        except Refused as refused:
            reason, detail = refused.reason, str(refused)
        made = (example.ids, example.mask, list(example.notes), conversation.file, reason, detail, conversation.row)
        for name, value in zip(out, made, strict=True):
            out[name].append(value)
    return out


def read(sources: str | Sequence[str], reading: Reading, tally: Tally) -> Path:
    """The cache folder that holds the sources' conversations, tally and rejects; reads the sources where there is none.

    Where they cannot be read to the end, ``tally`` takes what was counted until then.
    """
    given = [sources] if isinstance(sources, str) else list(sources)
    files = [local_files(source) for source in given]
    # what is not a file here may be another thing next time
    identity = [[str(file), sha256(file)] for found in files for file in found] if all(files) else uuid.uuid4().hex
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "draftsmith" / f"read-{digest(identity, asdict(reading))}"
    if (folder / "tally.json").exists():
        return folder
    with new_directory(folder, force=True) as partial, open(partial / "rejects.jsonl", "w", encoding="utf-8") as rejects:
        own = Tally(rejects=rejects)
        with ArrowWriter(path=str(partial / "conversations.arrow"), features=RAW) as writer:
            before = 0
            try:
                for conversation in read_conversations(given, own, reading):
                    text = json.dumps(asdict(conversation), ensure_ascii=False)
                    writer.write({"conversation": text, "changed": own.changed_rows > before})
                    before = own.changed_rows
            except UserError:
                rejects.flush()
                tally.take(own, partial / "rejects.jsonl")
                raise
            writer.finalize()
        (partial / "tally.json").write_text(json.dumps(own.as_json()))
    return folder


def load(folder: Path) -> tuple[Tally, datasets.Dataset]:
    """What ``read`` left in a cache folder."""
    return Tally.of(json.loads((folder / "tally.json").read_text())), datasets.Dataset.from_file(
        str(folder / "conversations.arrow")
    )


def tokenizer_digest(tokenizer: Any) -> str:
    """Changes with the vocabulary, the way of splitting, the special tokens and the chat template."""
    core = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    return digest(core, tokenizer.chat_template, {key: str(value) for key, value in tokenizer.special_tokens_map.items()})


def digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps([FORMAT, datasets.__version__, *parts], sort_keys=True).encode()).hexdigest()[:24]


def sha256(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
