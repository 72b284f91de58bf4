"""The command line's part about data: one thin command per verb."""

import contextlib
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Annotated

import typer

from .console import AsJson, Debug, Dtype, Force, Out, Progress, Seed, command_line, show
from .data import audit, audit_page, audit_text, extract, interchange, regenerate, synthesize, upkeep
from .data.conversations import Reading, read_conversations
from .data.engine import Engine, EngineStates, layers_for
from .data.examples import prepare, sha256
from .data.facts import TargetFacts
from .data.features import lengths_of
from .data.manifest import Part
from .data.precision import DTYPES
from .data.records import local_files
from .data.rewriting import Settings
from .data.shown import FirstDrops
from .data.store import SUFFIX
from .data.tally import Tally
from .ends import Ends
from .errors import UserError
from .heads.base import DraftHead
from .heads.kinds import KINDS
from .outputs import new_directory, refuse_existing, refuse_parent
from .sampling import Sampling
from .target import Target

data_app = command_line(no_args_is_help=True, help="Look at training data, and make it.")

AHEAD = 4  # conversations asked for early, for every request under way

TargetName = Annotated[str, typer.Option("--target", help="a model directory, a hub id or a .gguf file")]

# how conversations are read: the same for every command that reads them
Sources = Annotated[list[str], typer.Argument(help="files, folders or globs of conversations, - for stdin, or a hub id")]
Format = Annotated[str, typer.Option("--format", help="the shape of the rows; auto tells it by their content")]
Columns = Annotated[
    list[str] | None, typer.Option("--columns", help="OURS=THEIRS names a column, such as prompt=q; repeatable")
]
Split = Annotated[str, typer.Option(help="the part of a data set")]
Salvage = Annotated[bool, typer.Option("--salvage", help="keep what can be read of a damaged file")]
Rejects = Annotated[Path | None, typer.Option(help="write dropped rows and their reasons to this file")]
Strict = Annotated[bool, typer.Option("--strict", help="make any dropped row an error")]


def reading_of(shape: str, columns: list[str] | None, salvage: bool, split: str) -> Reading:
    """How the flags say to read. Raises UserError for a column that is not written as OURS=THEIRS."""
    pairs = [pair.partition("=") for pair in columns or []]
    for ours, sign, theirs in pairs:
        if not (ours and sign and theirs):
            raise UserError(f"--columns {ours}{sign}{theirs} names no column: write OURS=THEIRS, such as prompt=question.")
    return Reading(shape, {ours.strip(): theirs.strip() for ours, _, theirs in pairs}, salvage, split)


@data_app.command("inspect")
def inspect_data(
    sources: Sources,
    target: TargetName,
    max_length: Annotated[int, typer.Option(min=3, help="tokens; longer conversations are cut on the right")] = 2048,
    vocab_sizes: Annotated[str, typer.Option(help="draft vocabularies, such as 8192,16384,32000; default: a few")] = "",
    taps: Annotated[str | None, typer.Option(help="layers, such as 2,15,27; default: those that --head reads")] = None,
    head: Annotated[str, typer.Option(help="the head kind to train: " + ", ".join(KINDS))] = "eagle3",
    batch_size: Annotated[int, typer.Option(min=1, help="conversations of a batch, for the padding")] = 8,
    show_rows: Annotated[list[str] | None, typer.Option("--show", help="ROW or FILE:ROW to show by token; repeatable")] = None,
    html: Annotated[Path | None, typer.Option(help="write everything to this page, too")] = None,
    timed: Annotated[bool, typer.Option("--time", help="load the target and time a few batches")] = False,
    batch_tokens: Annotated[int, typer.Option(min=1, help="with --time: tokens of a batch, padding included")] = 8192,
    dtype: Dtype = "auto",
    device: Annotated[str | None, typer.Option(help="with --time: cpu, cuda:0, ...; auto spreads the target")] = None,
    only_last: Annotated[bool, typer.Option("--only-last", help="supervise the last answer of each row alone")] = False,
    shape: Format = "auto",
    columns: Columns = None,
    split: Split = "train",
    salvage: Salvage = False,
    rejects: Rejects = None,
    strict: Strict = False,
    workers: Annotated[int, typer.Option(min=1, help="processes that tokenize")] = 1,
    seed: Seed = 0,
    force: Force = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say what data holds for a target: counts, lengths, masks, template checks, vocabulary, and the cost of its states."""
    if html:
        refuse_existing(html, force)
    kind = kind_of(head)
    facts = TargetFacts.read(target)
    chosen = tap_list(taps) if taps is not None else kind.default_taps(facts)  # type: ignore[arg-type] (it asks for the depth)
    question = audit.Question(
        max_length,
        reading_of(shape, columns, True, split),
        tuple(chosen),
        size_list(vocab_sizes),
        tuple(show_rows or ()),
        batch_size,
        seed,
        only_last,
        workers,
    )
    with rejects_file(rejects) as opened:
        found, examples = audit.audit(sources, facts, question, FirstDrops(rejects=opened, strict=strict))
    if timed:
        loaded = Target.load(target, dtype, device)
        loaded.check_taps(chosen)
        with Progress("timing batches", audit.TIMED + 1) as bar:
            found.document["extraction"] = audit.time_features(loaded, examples, chosen, batch_tokens, bar.advance)
    if html:
        audit_page.write(html, audit_page.page(found, facts.tokenizer, sources))
    document = {**found.document, "html": str(html) if html else None}
    show(document, as_json, audit_text.report(found, facts.tokenizer, bool(show_rows)))
    if damaged := found.document["damaged"] if not salvage else None:
        said = damaged["message"].rstrip(".")
        raise UserError(f"{said}: mend or replace the file, or pass --salvage to use what can be read.")


def size_list(text: str) -> tuple[int, ...]:
    """Sizes written as 8192,16384; "" is none."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() for word in words):
        raise UserError(f"--vocab-sizes {text!r} is no list of sizes: write numbers with commas, such as 8192,16384.")
    return tuple(map(int, words))


@data_app.command("synthesize")
def synthesize_data(
    target: TargetName,
    out: Out,
    conversations: Annotated[int, typer.Option(min=1, help="rows of train.jsonl")],
    held_out: Annotated[int, typer.Option(min=0, help="rows of heldout.jsonl")] = 0,
    seed: Seed = 0,
    user_temperature: Annotated[float, typer.Option(help="for the user's turns")] = 0.8,
    user_top_p: Annotated[float, typer.Option(help="for the user's turns")] = 0.9,
    answer_temperature: Annotated[float, typer.Option(help="for the answers; 0 is greedy")] = 0.0,
    max_user_tokens: Annotated[int, typer.Option(min=1, help="longer user turns are dropped")] = 64,
    max_answer_tokens: Annotated[int, typer.Option(min=1, help="longer answers are cut there")] = 160,
    batch: Annotated[int, typer.Option(min=1, help="conversations written at once")] = 128,
    dtype: Dtype = "auto",
    force: Force = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Let the target write conversations, both sides: train.jsonl, heldout.jsonl, provenance.json."""
    user, answer = Sampling(user_temperature, top_p=user_top_p), Sampling(answer_temperature)
    settings = synthesize.Settings(seed, user, answer, max_user_tokens, max_answer_tokens, batch)
    with new_directory(out, force) as partial:
        loaded = Target.load(target, dtype)
        with Progress("writing conversations", conversations + held_out) as bar:
            provenance = synthesize.write(loaded, partial, conversations, held_out, settings, bar.advance)
    show({**provenance, "out": str(out)}, as_json, f"{conversations} conversations and {held_out} held out: {out}")


@data_app.command("regenerate")
def regenerate_answers(
    sources: Sources,
    out: Annotated[Path, typer.Option(help="the JSONL file to write")],
    target: Annotated[str | None, typer.Option(help="let this model write: a directory, a hub id or a .gguf file")] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="let a server write that speaks the OpenAI protocol: http://host:8000/v1")
    ] = None,
    model: Annotated[str | None, typer.Option(help="its name at the endpoint; default: the first one served")] = None,
    temperature: Annotated[str, typer.Option(help="0 is greedy; 0,0.7,1 draws one of these for each conversation")] = "0",
    top_p: Annotated[float, typer.Option(help="1 switches it off")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 switches it off")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="longer answers are cut there")] = 1024,
    seed: Seed = 0,
    batch: Annotated[int, typer.Option(min=1, help="conversations that --target writes at once")] = 32,
    dtype: Dtype = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda:0, ...; auto spreads the target")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="requests to --endpoint under way at once")] = 32,
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds for one try of a request")] = 600.0,
    tries: Annotated[int, typer.Option(min=1, help="of one request, with growing waits between them")] = 8,
    token_budget: Annotated[int | None, typer.Option(min=1, help="begin no conversation after so many new tokens")] = None,
    in_order: Annotated[bool, typer.Option("--in-order/--as-finished", help="the order of the output's rows")] = True,
    limit: Annotated[int | None, typer.Option(min=1, help="only the first N conversations")] = None,
    shape: Format = "auto",
    columns: Columns = None,
    split: Split = "train",
    salvage: Salvage = False,
    rejects: Rejects = None,
    strict: Strict = False,
    force: Annotated[bool, typer.Option(help="replace what exists; begin anew where other settings were interrupted")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Let the target rewrite every answer of conversations, in order; a run that was interrupted goes on."""
    if (target is None) == (endpoint is None):
        raise UserError("name one writer: --target for a model in this process, or --endpoint for a server that runs it.")
    settings = Settings(temperatures(temperature), top_p, top_k, max_new_tokens, seed)
    regenerate.check_output(out, force)
    if out.resolve() in {file.resolve() for source in sources for file in local_files(source)}:
        raise UserError(f"--out {out} is what is read: name another file.")
    with counted(rejects, strict) as tally:
        read = read_conversations(sources, tally, reading_of(shape, columns, salvage, split))
        job = regenerate.Job(list(islice(read, limit)), settings, out, tally, in_order, token_budget, force)
        if target:
            summary = regenerate.in_process(job, Target.load(target, dtype, device), batch)
        else:
            summary = regenerate.through_server(job, str(endpoint), model, concurrency, timeout, tries)
        show(summary, as_json, regenerate.sentence(summary))


def temperatures(text: str) -> tuple[float, ...]:
    """Numbers written as 0,0.7,1."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError as error:
        raise UserError(f"--temperature {text!r} is no number, nor several with commas: write 0.7 or 0,0.7,1.") from error


@contextlib.contextmanager
def counted(rejects: Path | None, strict: bool) -> Iterator[Tally]:
    """A tally of rows that writes the dropped ones to ``rejects``; warns at the end of damage and of many dropped rows."""
    with rejects_file(rejects) as file:
        tally = Tally(rejects=file, strict=strict)
        yield tally
    tally.warn()


@contextlib.contextmanager
def rejects_file(rejects: Path | None) -> Iterator[IO[str] | None]:
    """The file for dropped rows, in place of what an earlier run wrote there. Raises UserError where another file stands."""
    if rejects is None:
        yield None
        return
    refuse_parent(rejects)
    if rejects.exists() and not is_rejects(rejects):
        raise UserError(f"--rejects {rejects} exists and holds something else than dropped rows: name another file.")
    with rejects.open("w", encoding="utf-8") as file:
        yield file


def is_rejects(path: Path) -> bool:
    """Whether a file is empty or begins like one of dropped rows."""
    with path.open("rb") as file:
        first = file.readline()
    try:
        return not first or {"file", "row", "reason"} <= set(json.loads(first))
    except (ValueError, TypeError):
        return False


@data_app.command("extract")
def extract_states(
    sources: Sources,
    target: TargetName,
    out: Out,
    taps: Annotated[str | None, typer.Option(help="layers, such as 2,15,27; default: those that --head reads")] = None,
    head: Annotated[str, typer.Option(help="the head kind to train from the store: " + ", ".join(KINDS))] = "eagle3",
    dtype: Annotated[str, typer.Option(help="of the stored states: " + ", ".join(DTYPES))] = "bfloat16",
    max_length: Annotated[int, typer.Option(min=3, help="tokens; longer conversations are cut on the right")] = 2048,
    engine: Annotated[
        str | None, typer.Option(help="let a vLLM server run the target that extracts hidden states: http://host:8000/v1")
    ] = None,
    engine_model: Annotated[str | None, typer.Option(help="its name there; default: the first one served")] = None,
    engine_layers: Annotated[
        str | None, typer.Option(help="the layers that it extracts; default: the taps and the target's depth")
    ] = None,
    engine_folder: Annotated[Path | None, typer.Option(help="where its files are seen here; default: as it names them")] = None,
    in_flight: Annotated[int, typer.Option(min=1, help="requests to --engine under way at once")] = 8,
    num_shards: Annotated[int, typer.Option(min=1, help="machines that share the rows, each with an output of its own")] = 1,
    shard: Annotated[int, typer.Option(min=0, help="which of them this one is, from 0")] = 0,
    batch_tokens: Annotated[int, typer.Option(min=1, help="tokens of one target pass, padding included")] = 8192,
    target_dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda:0, ...; auto spreads the target")] = None,
    only_last: Annotated[bool, typer.Option("--only-last", help="supervise the last answer of each row alone")] = False,
    shape: Format = "auto",
    columns: Columns = None,
    split: Split = "train",
    salvage: Salvage = False,
    rejects: Rejects = None,
    strict: Strict = False,
    workers: Annotated[int, typer.Option(min=1, help="processes that tokenize")] = 1,
    force: Force = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Keep the target's hidden states of all conversations on disk; a run that was interrupted goes on."""
    if shard >= num_shards:
        raise UserError(f"--shard {shard} is none of {num_shards}: give 0 to {num_shards - 1}, or raise --num-shards.")
    kind = kind_of(head)
    refuse_existing(out, force)
    part, loaded = Part(index=shard, of=num_shards), (Ends if engine else Target).load(target, target_dtype, device)
    chosen = tap_list(taps) if taps is not None else kind.default_taps(loaded)
    reading = reading_of(shape, columns, salvage, split)
    with counted(rejects, strict) as tally:
        examples = prepare(
            sources, loaded.tokenizer_or_refuse(), loaded.vocab_size, max_length, tally, reading, only_last, workers
        )
    files = [{"path": str(path), "sha256": sha256(path)} for source in sources for path in local_files(source)] or sources
    about = {"files": files, "max_length": max_length, "data": tally.as_json()}
    lengths = lengths_of(examples)[part.rows(len(examples))]
    given, tokens = None, int(lengths.sum())
    if engine:
        layers = tap_list(engine_layers) if engine_layers else layers_for(chosen, loaded.depth)
        server = Engine(engine, layers, engine_model, engine_folder, in_flight)
        about["engine"] = server.connect(loaded, int(lengths.max(initial=0)))
        given = EngineStates(server, loaded, chosen, AHEAD * in_flight, strict=True)
    with Progress("extracting tokens", tokens) as bar:
        report = extract.extract(
            loaded,
            examples,
            chosen,
            out,
            dtype,
            part,
            batch_tokens,
            about=about,
            force=force,
            progress=bar.advance,
            given=given,
        )
    size = f"{report['bytes'] / report['tokens']:.0f} bytes a token, {report['tokens_per_s']:.0f} tokens/s"
    text = f"{tally.sentence()}\n{report['rows']} rows, {report['tokens']} tokens, {size}: {out}"
    show({**report, "data": tally.as_json(), "out": str(out)}, as_json, text)


def kind_of(head: str) -> type[DraftHead]:
    """The head kind that --head names."""
    if head not in KINDS:
        raise UserError(f"--head {head!r} is no head kind: choose {', '.join(KINDS)}.")
    return KINDS[head]


def tap_list(text: str) -> list[int]:
    """Layers written as 2,15,27; "" is none."""
    try:
        return [int(word) for word in text.split(",") if word.strip()]
    except ValueError as error:
        raise UserError(f"--taps {text!r} is no list of layers: write numbers with commas, such as 2,15,27.") from error


@data_app.command("import")
def import_states(
    prepared: Annotated[Path, typer.Argument(help="a data set as speculators prepares it: input_ids and loss_mask")],
    target: TargetName,
    layers: Annotated[str, typer.Option(help="the layers in its files, such as 2,15,27,30; nothing in them names these")],
    out: Out,
    files: Annotated[
        Path | None, typer.Option(help="the folder of hs_N.safetensors; default: hidden_states in the data set's")
    ] = None,
    taps: Annotated[
        str | None, typer.Option(help="the layers to keep; default: all but the last, which is kept behind the final norm")
    ] = None,
    dtype: Annotated[str, typer.Option(help="of the stored states: " + ", ".join(DTYPES))] = "bfloat16",
    target_dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda:0, ...: where the final norm runs")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="make a row without states an error")] = False,
    force: Force = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make a feature store of hidden-state files as speculators and hs-connectors write them; no layer is loaded."""
    refuse_existing(out, force)
    loaded, named = Ends.load(target, target_dtype, device), tap_list(layers)
    rows = interchange.PreparedRows(prepared, files or prepared / interchange.FOLDER, strict)
    given = interchange.FileStates(rows, loaded, named, tap_list(taps) if taps is not None else named[:-1])
    nats = given.nats()
    about = {"hidden_states": {"layers": named, "left_out": dict(rows.left_out), "nats": nats}}
    with Progress("reading tokens", int(rows.lengths.sum())) as bar:
        report = extract.extract(
            loaded, rows, given.taps, out, dtype, about=about, force=force, progress=bar.advance, given=given
        )
    left = "".join(f", {count} left out ({reason})" for reason, count in sorted(rows.left_out.items()))
    text = f"{report['rows']} rows, {report['tokens']} tokens{left}: {out}\nunder them the next tokens cost {nats:.2f} nats"
    show({**report, "left_out": dict(rows.left_out), "nats": nats, "out": str(out)}, as_json, text)


@data_app.command("export")
def export_states(
    directory: Annotated[Path, typer.Argument(help="a feature store whose taps end with the target's depth")],
    out: Out,
    force: Force = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a feature store as a prepared data set with hidden-state files, for speculators."""
    report = interchange.export(directory, out, force)
    text = f"{report['rows']} rows, {report['tokens']} tokens, layers {','.join(map(str, report['layers']))}: {out}"
    show({**report, "out": str(out)}, as_json, text)


@data_app.command("merge")
def merge_stores(
    parts: Annotated[list[Path], typer.Argument(help="the stores that the machines wrote")],
    out: Out,
    force: Force = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Join the parts of an extraction into one store, by links where one disk holds both."""
    manifest = upkeep.merge(parts, out, force)
    data = manifest.identity.data
    show({**data.model_dump(), "out": str(out)}, as_json, f"{data.rows} rows, {data.tokens} tokens: {out}")


@data_app.command("verify")
def verify_store(
    directory: Annotated[Path, typer.Argument(help="a feature store")], as_json: AsJson = False, debug: Debug = False
) -> None:
    """Read every byte of a feature store; damage is named, and ends with status 2."""
    with Progress("checking shards", len(list(directory.glob(f"*{SUFFIX}")))) as bar:
        findings = upkeep.verify(directory, bar.advance)
    if as_json or findings.sound:
        aside = f"; no part of it: {', '.join(findings.strangers)}" if findings.strangers else ""
        show(findings.as_json(), as_json, f"{findings.rows} rows in {findings.shards} shards are sound: {directory}{aside}")
    if not findings.sound:
        raise UserError(f"{directory} is damaged ({findings.sentence()}): restore copies, or mend it as docs/store.md tells.")
