"""The command line's part about benchmarks: one thin command per verb."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import AsJson, Debug, command_line, show
from .eval.protocols import PROTOCOLS, read_protocol
from .eval.tasks import TASKS, available, load_task, read_task

tasks_app = command_line(no_args_is_help=True, help="Look at the benchmarks that eval can run.")

DataDir = Annotated[
    Path | None,
    typer.Option(help="the folder of benchmarks' files; default: $DRAFTSMITH_DATA, or ~/.cache/draftsmith/tasks"),
]


@tasks_app.command("list")
def list_tasks(data_dir: DataDir = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """The shipped tasks, where each would be read from, and the shipped protocols."""
    tasks = {name: load_task(name) for name in TASKS}
    found = {name: {"about": task.about, "from": available(task, name, data_dir)} for name, task in tasks.items()}
    protocols = {name: {"about": read_protocol(name).about} for name in PROTOCOLS}
    lines = [
        f"{name:18} {one['about']}\n{'':18} {one['from'] or 'no data yet: tasks show tells what to do'}"
        for name, one in found.items()
    ]
    lines += ["", "protocols:", *(f"{name:18} {one['about']}" for name, one in protocols.items())]
    show({"tasks": found, "protocols": protocols}, as_json, "\n".join(lines))


@tasks_app.command("show")
def show_task(
    name: Annotated[str, typer.Argument(help="a shipped task, or a YAML file")],
    data_dir: DataDir = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """What a task asks: how many prompts of which categories, and the first of them."""
    task, prompts = load_task(name), read_task(name, data_dir)
    first = prompts[0]
    document: dict[str, Any] = {
        "task": name,
        "about": task.about,
        "from": available(task, name, data_dir),
        "prompts": len(prompts),
        "turns": sum(1 + len(prompt.later) for prompt in prompts),
        "categories": dict(Counter(prompt.category for prompt in prompts)),
        "max_new": task.max_new,
        "stop": task.stop,
        "first": {"id": first.id, "messages": first.messages, "later": list(first.later)},
    }
    lines = [f"{key}: {value}" for key, value in document.items() if key not in ("task", "first")]
    questions = [str(message["content"]) for message in first.messages] + list(first.later)
    show(document, as_json, "\n".join([*lines, "", first.id, *questions]))


@tasks_app.command("protocol")
def show_protocol(
    name: Annotated[str, typer.Argument(help="a shipped protocol, or a YAML file")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """The settings of a protocol; those of a shipped one come with their sources."""
    protocol = read_protocol(name)
    text = PROTOCOLS.get(name, Path(name)).read_text(encoding="utf-8")
    show({"protocol": name, **protocol.model_dump(mode="json")}, as_json, text)
