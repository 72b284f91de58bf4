"""Runs inside the vLLM environment: the hidden-states connector of vLLM 0.32 for a server on a CPU.

vLLM's own connector copies states off an accelerator through pinned memory, and its worker ends with the first request where
there is none. What it writes, and how it locks and names its files, is kept.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # type: ignore[import-not-found]
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)

DONE = SimpleNamespace(synchronize=lambda: None, query=lambda: True)  # in place of the event at the end of a copy


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending: Any) -> None:
        slots = torch.tensor(pending.block_ids)[:, None] * self._block_size + torch.arange(self._block_size)
        states = extract_from_kv_cache(self._kv_cache, slots.flatten(), len(pending.token_ids)).clone()
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        lock = self._lock_fds.pop(pending.req_id, None)
        written = self._executor.submit(self._write_tensors, tensors, DONE, pending.filename, lock)
        self._req_copy_events[pending.req_id] = DONE
        self._req_futures[pending.req_id] = written
        written.add_done_callback(partial(self._on_write_done, pending.req_id))
