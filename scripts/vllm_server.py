"""vLLM's own server on loopback, in float32 on one thread, for checks that ask a real engine."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from draftsmith.errors import UserError

PYTHON = Path(__file__).resolve().parent.parent / ".venv-vllm/bin/python"
CONTEXT = 1024  # tokens


def require_engine(python: Path) -> None:
    """Raise UserError where the engine's Python is not there."""
    if not python.exists():
        raise UserError(f"{python} does not exist: run make .venv-vllm/ready, or name --vllm-python.")


@contextmanager
def server(python: Path, path: str, name: str, log_to: Path, more: Sequence[object] = ()) -> Iterator[tuple[str, str]]:
    """A server of the model at ``path``, served as ``name``, on a free port; yields its address, with /v1, and its version.

    ``more``: arguments of the command line. Raises UserError where it does not start; its output goes to ``log_to``.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", port]
    command += ["--model", path, "--served-model-name", name]
    command += ["--dtype", "float32", "--max-model-len", CONTEXT, "--max-num-seqs", 4, "--generation-config", "vllm"]
    command += ["--enforce-eager", "--no-enable-prefix-caching", *more]
    with open(log_to, "w", encoding="utf-8") as log:
        process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=environment(), start_new_session=True)
        try:
            version = wait_for(f"http://127.0.0.1:{port}", process, log_to)
            yield f"http://127.0.0.1:{port}/v1", version
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the processes that it may have left behind


def extracting(layers: Sequence[int], folder: Path) -> list[object]:
    """Arguments for a server that writes the hidden states of ``layers`` into ``folder``."""
    asked = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
    method = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": asked}
    connector = {
        "kv_connector": "CpuHiddenStatesConnector",
        "kv_connector_module_path": "vllm_hidden_states",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return ["--speculative-config", json.dumps(method), "--kv-transfer-config", json.dumps(connector)]


def environment() -> dict[str, str]:
    """Ours without what would lead the engine's Python to our packages; one thread, and room for a few sequences."""
    ours = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    asked = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    asked["PYTHONPATH"] = str(Path(__file__).resolve().parent)  # vllm_hidden_states
    return {**ours, **asked, "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


def wait_for(url: str, process: subprocess.Popen, log: Path) -> str:
    """The server's version once it answers. Raises UserError where it ends before, or takes ten minutes."""
    for _ in range(600):
        if process.poll() is not None:
            raise UserError(f"the engine ended with status {process.returncode}: its last words are in {log}.")
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return httpx.get(f"{url}/version", timeout=5).json()["version"]
        except httpx.TransportError:
            pass
        time.sleep(1)
    raise UserError(f"the engine did not answer within ten minutes: its last words are in {log}.")
