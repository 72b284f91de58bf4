"""Kill a job at random moments and start it again, as a machine that dies and comes back would."""

import multiprocessing
import random
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess


def kill_until_done(job: Callable[[], object], kills: int, seed: int, longest: float = 1.0) -> int:
    """Run ``job`` in a process of its own and SIGKILL it up to ``kills`` times, then let it finish.

    Each time the process lives between 0 and ``longest`` seconds, drawn from ``seed``. Returns how many kills hit a running
    job: fewer than ``kills`` where it was done before. Raises RuntimeError where the job itself fails. ``job`` is pickled,
    so it is a function of an importable module, or a ``functools.partial`` of one.
    """
    draw = random.Random(seed)
    for hits in range(kills):
        if _survives(job, draw.uniform(0, longest)):
            return hits
    if not _survives(job, None):
        raise RuntimeError("something else killed the job")
    return kills


def kill_when(job: Callable[[], object], happened: Callable[[], bool]) -> bool:
    """Run ``job`` in a process of its own and SIGKILL it as soon as ``happened()``; False where it was done before."""
    process = _started(job)
    while process.exitcode is None and not happened():
        time.sleep(0.002)
    return not _ended_well(process)


def draftsmith(*arguments: object) -> None:
    """The command line, as ``draftsmith ARGUMENTS`` would run it: ``partial(draftsmith, "data", "extract", …)`` is a job."""
    from draftsmith.cli import main

    sys.argv = ["draftsmith", *map(str, arguments)]
    main()


def _survives(job: Callable[[], object], seconds: float | None) -> bool:
    """Whether the job ends well before the kill, which comes after ``seconds`` (None: it may take as long as it likes)."""
    process = _started(job)
    process.join(seconds)
    return _ended_well(process)


def _started(job: Callable[[], object]) -> BaseProcess:
    # forked from a server that has the modules loaded, a process starts in a fraction of the seconds that importing takes
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["draftsmith.cli"])
    process = context.Process(target=_alone, args=(job,))
    process.start()
    return process


def _ended_well(process: BaseProcess) -> bool:
    process.kill()
    process.join()
    if process.exitcode not in (0, -signal.SIGKILL):
        raise RuntimeError(f"the job ended with status {process.exitcode}")
    return process.exitcode == 0


def _alone(job: Callable[[], object]) -> None:
    import torch

    torch.set_num_threads(1)
    job()
