"""Where the time of a step goes: a trace of a few steps for a trace viewer, and a table of what cost most in them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import profile, schedule

from ..console import note
from ..errors import first_line

WARM_UP = 3  # steps before the traced ones: the first of a process allocate and compile
ROWS = 60  # operators in the table


@contextmanager
def profiled(steps: int, first: int, last: int, folder: Path) -> Iterator[Callable[[], None]]:
    """Trace ``steps`` steps of a run that takes the steps from ``first`` to ``last``; yields what to call after each.

    The traced ones come after a warm-up, which is shorter where the run is too short for it. Leaves
    ``folder``/steps-A-B.json.gz, which chrome://tracing, ui.perfetto.dev and tensorboard open, and steps-A-B.txt, the costliest
    operators by their own time on the GPU or, without one, the CPU. 0 steps: nothing is traced.
    """
    steps = min(steps, last - first + 1)
    if steps < 1:
        yield lambda: None
        return
    warm_up = min(WARM_UP, last - first + 1 - steps)
    begin = first + warm_up

    def write(trace: profile) -> None:
        place = folder / f"steps-{begin}-{begin + steps - 1}"
        spent = "self_device_time_total" if trace.use_device else "self_cpu_time_total"
        try:
            folder.mkdir(exist_ok=True)
            trace.export_chrome_trace(f"{place}.json.gz")
            table = trace.key_averages().table(sort_by=spent, row_limit=ROWS, max_name_column_width=70)
            place.with_suffix(".txt").write_text(table + "\n", encoding="utf-8")
        except OSError as error:  # a full disk, say
            note(f"WARNING: the profile could not be written: {first_line(error)}")
        else:
            note(f"profile of steps {begin} to {begin + steps - 1}: {place}.json.gz and .txt")

    times = schedule(wait=0, warmup=warm_up, active=steps, repeat=1)
    with profile(schedule=times, on_trace_ready=write) as trace:
        yield trace.step
