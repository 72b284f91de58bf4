"""``draftsmith eval``: measure proposers on a target, over a grid of settings."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from .console import AsJson, Debug, Out, command_line, note, show
from .errors import UserError
from .eval.cells import adopt, finish, finished, holding, partial
from .eval.fingerprint import of_machine
from .eval.grid import Grid
from .eval.prompts import Prompt, read_prompts
from .eval.protocols import Protocol, protocol_prompts, read_protocol
from .eval.registry import LOOKUPS, MODEL, read_head, read_lookup
from .eval.report import overview, table, write_report
from .eval.sweep import Rig, refuse, sweep
from .eval.tasks import read_task
from .eval.tracking import track
from .eval.typical import read_typical
from .heads.base import read_config
from .outputs import refuse_existing
from .target import Target
from .tracker import TRACKERS

Number = TypeVar("Number", int, float)
INTERRUPTED = 130  # the exit status of what Ctrl-C ended, by the shells' custom


class Measuring(TyperGroup):
    """A group whose first argument may be no command's name: then all arguments are those of its command ``measure``."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **settings: Any) -> Any:
        command = super() if args and args[0] in self.commands else self.commands["measure"]
        return command.make_context(info_name, args, parent, **settings)


eval_app = command_line(cls=Measuring)


@eval_app.callback()
def group() -> None:
    """Measure proposers; compare measurements."""


@eval_app.command("measure", hidden=True)
def measure_command(
    proposers: Annotated[
        list[str], typer.Argument(help=f"head directories, model:DIR (a small LM), {', '.join(LOOKUPS)} with settings behind :")
    ],
    out: Out,
    prompts: Annotated[list[str] | None, typer.Option(help="JSONL of messages, prompt or turns; may be repeated")] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="a benchmark's name or YAML file; may be repeated; see docs/tasks.md")
    ] = None,
    protocol: Annotated[
        str | None, typer.Option(help="the tasks and settings of a published comparison; other options change it")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="a model directory, a hub id or a .gguf file; default: the first head's own")
    ] = None,
    tree: Annotated[
        list[str] | None,
        typer.Option(
            help="for heads and models: none, chain:5 (the default), chain:8,stop=0.3, chain:8,adapt, tree:4x2x1 (children by "
            "depth), a JSON list of paths, dynamic:24, beam:4x5, search:24 or auto; may be repeated; see docs/evaluation.md"
        ),
    ] = None,
    temperature: Annotated[list[str] | None, typer.Option(help="0 (the default) is greedy; 0,0.7,1 measures all three")] = None,
    top_p: Annotated[list[str] | None, typer.Option(help="1 (the default) switches it off; may be a list, too")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 (the default) switches it off")] = None,
    batch: Annotated[list[str] | None, typer.Option(help="sequences decoded at once; default 1; may be a list, too")] = None,
    sampled_drafts: Annotated[
        bool, typer.Option("--sampled-drafts", help="draw drafts instead of taking the likeliest")
    ] = False,
    lossy_typical: Annotated[
        str | None, typer.Option(help="EPS[,DELTA]: Medusa's typical acceptance, which changes the text; 0.09,0.3 is Medusa's")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=2, help="per answer; default 128")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="use the first N prompts of every source")] = None,
    per_category: Annotated[
        int | None, typer.Option(min=1, help="use the first N prompts of every category of every source")
    ] = None,
    baseline: Annotated[int | None, typer.Option(min=0, help="decode the first N plainly too; default: all")] = None,
    tracker: Annotated[str | None, typer.Option(help=" or ".join(TRACKERS) + ": log the report's numbers, too")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto (the default), float32, bfloat16 or float16")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda:0, ...; auto spreads the target")] = None,
    seed: Annotated[int | None, typer.Option(help="of everything drawn at random; default 0")] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="replace the output, keeping its cells; allow another target of the same sizes"),
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure proposers: acceptance length, acceptance by position, speed against plain decoding.

    Proposers, trees, temperatures, top-p, batch sizes and prompts may each be several: every combination is a cell of the
    report. An interrupted command goes on where it stopped when it is given again; see docs/sweeps.md. draftsmith eval compare
    A B puts finished reports side by side.
    """
    refuse_existing(out, force)
    if tracker not in (None, *TRACKERS):
        raise UserError(f"--tracker {tracker!r} is none that is known: choose {' or '.join(TRACKERS)}.")
    typical = read_typical(lossy_typical) if lossy_typical is not None else None
    known = read_protocol(protocol) if protocol else None
    given = {
        "tree": tree and tuple(dict.fromkeys(tree)),
        "temperature": numbers("--temperature", temperature, float),
        "top_p": numbers("--top-p", top_p, float),
        "top_k": top_k,
        "batch": numbers("--batch", batch, int),
        "sampled_drafts": sampled_drafts or None,
        "max_new_tokens": max_new_tokens,
        "dtype": dtype,
        "seed": seed,
    }
    standard = Grid.of(known) if known else Grid()
    grid = replace(standard, **{name: value for name, value in given.items() if value is not None})
    others = {"limit": limit, "per_category": per_category, "lossy_typical": lossy_typical}
    changed = [name for name in given if getattr(grid, name) != getattr(standard, name)]
    changed += [name for name, value in others.items() if value is not None]
    with interruptible(out):
        sources = read_sources(prompts or [], task or [], known, limit, per_category, max_new_tokens)
        loaded = Target.load(target or named_target(proposers), grid.dtype, device)
        heads = {text: read_head(text, loaded, force).to("cpu") for text in proposers if read_lookup(text) is None}
        if not heads and (tree or sampled_drafts):
            raise UserError(
                "--tree and --sampled-drafts shape what heads and models draft: a look-up's settings stand behind its colon."
            )
        rig = Rig(loaded, heads, sources, grid.max_new_tokens, baseline, grid.seed, typical)
        cells = grid.cells(proposers, heads, list(sources))
        refuse(rig, cells)
        about = {
            "proposers": proposers,
            "prompts": list(sources),
            "dtype": str(loaded.dtype),
            "max_new_tokens": grid.max_new_tokens,
            "seed": grid.seed,
            **of_machine(loaded),
        }
        if known:
            about["protocol"] = {"name": protocol, "about": known.about, "tau": known.tau, "changed": changed}
        with holding(out):
            if force:
                adopt(out)
            results, failed = sweep(rig, cells, out, show=True)
            about["failed"] = failed
            write_report(results, partial(out), about)
            if tracker:
                track(results, out.name, tracker, partial(out))
            finish(out)
    report = {"report": out / "report.html"}
    shown = table(results[0], report) if len(results) == 1 else overview(results, report)
    show({"results": results, "failed": failed, "out": str(out)}, as_json, shown)
    if known and changed:
        flags = ", ".join("--" + name.replace("_", "-") for name in changed)
        note(f"WARNING: with {flags} this is no longer the protocol {protocol}")
    for cell in failed:
        note(f"failed: {cell['proposer']} {cell['tree'] or ''} on {cell['prompts']}: {cell['why']}")
    if failed:
        raise typer.Exit(1)


def read_sources(
    prompts: Sequence[str],
    tasks: Sequence[str],
    protocol: Protocol | None,
    limit: int | None,
    per_category: int | None,
    max_new: int | None,
) -> dict[str, list[Prompt]]:
    """The prompts by source: of each the first ``per_category`` of every category, and of these the first ``limit``.
    ``max_new`` goes before what a task or protocol says of it."""
    if not prompts and not tasks and not protocol:
        raise UserError("there is nothing to ask: give --prompts FILE, --task NAME or --protocol NAME.")
    if protocol and (prompts or tasks):
        raise UserError("--protocol brings its own tasks: leave out --prompts and --task, or --protocol.")
    if protocol:
        found = protocol_prompts(protocol)
    else:
        found = {name: read_prompts(name) for name in prompts} | {name: read_task(name) for name in tasks}
    if per_category:
        found = {name: of_every_category(asked, per_category) for name, asked in found.items()}
    found = {name: asked[:limit] for name, asked in found.items()}
    if max_new is None:
        return found
    return {name: [replace(prompt, max_new=None) for prompt in asked] for name, asked in found.items()}


def of_every_category(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """The first so many prompts of every category, in their order."""
    seen: Counter[str] = Counter()
    chosen = []
    for prompt in prompts:
        seen[prompt.category] += 1
        if seen[prompt.category] <= count:
            chosen.append(prompt)
    return chosen


def named_target(proposers: Sequence[str]) -> str:
    """The target of the first head among the proposers."""
    for text in proposers:
        if read_lookup(text) is None and not text.startswith(MODEL):
            return read_config(text).target.name
    raise UserError("no proposer names a target: give the --target that they shall draft for.")


def numbers(flag: str, texts: Sequence[str] | None, kind: Callable[[str], Number]) -> tuple[Number, ...] | None:
    """The values of an option that may be repeated and may hold several behind commas."""
    if texts is None:
        return None
    try:
        return tuple(dict.fromkeys(kind(part) for text in texts for part in text.split(",")))
    except ValueError:
        raise UserError(f"{flag} {' '.join(texts)} cannot be read: give numbers, with commas between them.") from None


@contextmanager
def interruptible(out: Path) -> Iterator[None]:
    """Ctrl-C inside ends the process with a sentence on what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        kept = f"{finished(out)} finished cells are kept in {partial(out)}"
        note(f"interrupted: {kept}; the same command goes on where it stopped.")
        raise typer.Exit(INTERRUPTED) from None
