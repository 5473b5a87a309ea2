"""Plugins for the servers of the registered tests. SGLang loads them as it loads ours.

One shows what is in a server's conv pools. The others make one kernel of ours wrong, on the GPU
alone: what our plugin runs on the CPU at start-up is right.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import wrapt
from inkling_sconv.names import BACKEND_MODULE
from sglang.test.ci.ci_register import register_cuda_ci

# SGLang's run_suite.py refuses every file under test/registered that registers nothing.
register_cuda_ci(
    est_time=0, stage="base-b", runner_config="1-gpu-large", disabled="no tests: shared code"
)

POOLS_VARIABLE = "INKLING_SCONV_TEST_POOLS"
ZEROED = "the draft's checkpoints are zeros"


def dump_conv_pools() -> None:
    """Write every conv pool to ``pools.pt`` in a folder, once there is a file ``wanted`` in it."""
    folder, backends = Path(os.environ[POOLS_VARIABLE]), []

    def collect(module: Any) -> None:
        from inkling_sconv.probe.backend import find_backends

        for cls in find_backends(module):
            wrapt.wrap_function_wrapper(cls, "__init__", keep)

    def keep(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        backends.append(instance)

    def dump() -> None:
        # The server's other processes load the plugin too; they have no backend.
        while not (backends and (folder / "wanted").exists()):
            time.sleep(0.1)
        # With overlapped scheduling, one more step may follow the last answer.
        time.sleep(1)
        torch.cuda.synchronize()
        caches = {id(b._mamba_cache): b._mamba_cache for b in backends}
        torch.save([c.cpu() for m in caches.values() for c in m.conv], folder / "pools.pt")
        (folder / "done").touch()

    wrapt.register_post_import_hook(collect, BACKEND_MODULE)
    threading.Thread(target=dump, daemon=True).start()


def move_windows_one_row_late() -> None:
    """The refresh gives windows that end one row past their boundary."""

    def track(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> torch.Tensor:
        indices = wrapped(*args, **kwargs)
        if indices.is_cuda:
            query_start_loc = args[0]
            last = (query_start_loc[-1:].to(indices.dtype) - 1).clamp_(min=0)
            torch.minimum(indices + 1, last, out=indices)
        return indices

    wrapt.wrap_function_wrapper("inkling_sconv.ops.track_conv_indices", "track_conv_indices", track)


def zero_draft_checkpoints() -> None:
    """The draft keeps zeros where it should keep the conv window that ends on a boundary."""

    def update(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        hidden_states, cache, _, accepted, seq_lens, track_slots = args
        if not cache.is_cuda or track_slots is None:
            return
        rows, length, _ = hidden_states.shape
        base = seq_lens[:rows] - (length - kwargs["front"])
        end = base + accepted[:rows]
        interval, reach = kwargs["interval"], max(kwargs["front"] - cache.shape[1], 0)
        kept = (accepted[:rows] >= 0) & (end // interval * interval > base - reach)
        # Slot 0 is the dummy of every pool.
        cache.index_fill_(0, (track_slots[:rows] * kept).long(), 0)

    print(ZEROED, flush=True)
    wrapt.wrap_function_wrapper(
        "inkling_sconv.ops.draft_conv_state", "update_draft_conv_state", update
    )
