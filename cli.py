"""The command line: one thin command per verb."""

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer
from rich.table import Table

from .cli_advise import advise_command
from .cli_compare import compare_command
from .cli_data import data_app
from .cli_diagnose import diagnose
from .cli_eval import eval_app
from .cli_tasks import tasks_app
from .console import AsJson, Debug, Dtype, Force, Out, command_line, run_command_line, show
from .errors import UserError
from .heads.base import read_config
from .heads.engines.published import import_head
from .heads.engines.registry import ENGINES, exports, served
from .heads.engines.registry import export as export_head
from .heads.kinds import KINDS, load_head
from .outputs import new_directory, refuse_existing
from .recipes import shelf
from .recipes.schema import load_recipe, shipped
from .target import Target
from .train.__main__ import train_command

app = command_line(no_args_is_help=True)
recipes_app = command_line(no_args_is_help=True, help="The recipes that come with draftsmith.")
app.add_typer(data_app, name="data")
app.add_typer(eval_app, name="eval")
app.add_typer(tasks_app, name="tasks")
app.add_typer(recipes_app, name="recipes")
app.command("train")(train_command)
app.command("advise")(advise_command)
app.command("diagnose")(diagnose)
eval_app.command("compare")(compare_command)

TargetName = Annotated[
    str | None, typer.Option("--target", help="a model directory, a hub id or a .gguf file; default: the head's own")
]


@app.callback()
def draftsmith() -> None:
    """Train, measure and export draft heads for speculative decoding."""


@app.command()
def export(
    head: Annotated[Path, typer.Argument(help="a head directory, such as a run's head/")],
    to: Annotated[str, typer.Option(help=" or ".join(ENGINES))],
    out: Out,
    target: TargetName = None,
    draft_length: Annotated[
        int | None, typer.Option(help="the chain the engine shall draft; default: the depths trained")
    ] = None,
    dtype: Dtype = "auto",
    force: Force = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a head in the layout a serving engine loads, and read it back to be sure."""
    refuse_existing(out, force)
    config = read_config(head)
    loaded = Target.load(target or config.target.name, dtype)
    length = config.depths if draft_length is None else draft_length
    export_head(load_head(head), loaded, to, out, length, force)
    show({"engine": to, "draft_length": length, "out": str(out)}, as_json, f"written for {to}, drafting {length}: {out}")


@app.command("import")
def import_command(
    checkpoint: Annotated[Path, typer.Argument(help="a published checkpoint's directory")],
    target: Annotated[str, typer.Option(help="the model that the head drafts for: a directory, a hub id or a .gguf file")],
    out: Out,
    kind: Annotated[str | None, typer.Option(help="the head kind, where config.json does not tell it")] = None,
    dtype: Dtype = "auto",
    force: Force = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Read a published head, in any layout that export writes, as one of ours: to measure it or to train on from it."""
    if kind is not None and kind not in KINDS:
        raise UserError(f"--kind {kind!r} is no head kind; the kinds are {', '.join(KINDS)}.")
    with new_directory(out, force) as partial:
        head = import_head(checkpoint, Target.load(target, dtype), kind)
        head.save(partial)
    config = head.config
    about = {"kind": config.kind, "taps": config.taps, "depths": config.depths, "draft_vocab_size": config.draft_vocab_size}
    show({**about, "out": str(out)}, as_json, f"a head of kind {config.kind} for {config.target.name}: {out}")


@app.command()
def heads(as_json: AsJson = False, debug: Debug = False) -> None:
    """The head kinds, what each taps of the target, and which engines load it, in the releases the layouts are pinned to."""
    depth = 32
    kinds = {
        name: {
            "taps": kind.default_taps(SimpleNamespace(depth=depth)),  # type: ignore[arg-type]
            "lossless": True,
            "trains": True,
            "exports": exports(name),
            "served": served(name),
        }
        for name, kind in KINDS.items()
    }
    grid = Table("kind", f"taps of {depth} layers", "served by", "written for", box=None, padding=(0, 2, 0, 0))
    for name, kind in kinds.items():
        taps = ", ".join(map(str, kind["taps"])) or "none"
        written = ", ".join(engine for engine in kind["exports"] if engine not in kind["served"])
        grid.add_row(name, taps, ", ".join(kind["served"]), written)
    grid.caption = (
        "served by: a test loads it in the engine itself; written for: checked by the engine's published rules. Layouts are "
        "those of " + ", ".join(f"{name} {engine.version}" for name, engine in ENGINES.items())
    )
    show(kinds, as_json, grid)


@recipes_app.command("list")
def list_recipes(as_json: AsJson = False, debug: Debug = False) -> None:
    """Name the shipped recipes."""
    found = {name: shelf.about(path) for name, path in shipped().items()}
    show(found, as_json, "\n\n".join("\n    ".join([name, *lines]) for name, lines in found.items()))


@recipes_app.command("show")
def show_recipe(
    name: Annotated[str, typer.Argument(help="as recipes list prints it")], as_json: AsJson = False, debug: Debug = False
) -> None:
    """Print a shipped recipe; with --json, every default filled in."""
    path = shelf.find_shipped(name)
    show(load_recipe(path).model_dump(mode="json"), as_json, path.read_text(encoding="utf-8").rstrip())


@recipes_app.command("copy")
def copy_recipe(
    name: Annotated[str, typer.Argument(help="as recipes list prints it")],
    folder: Annotated[Path, typer.Argument(help="where to put it")],
    force: Force = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Copy a shipped recipe, with the data and accelerate configs that it names."""
    written = [str(path) for path in shelf.copy(name, folder, force)]
    show({"written": written}, as_json, "\n".join(written))


def main() -> None:
    run_command_line(app)
