"""The two forms of draft-extend leave one conv pool, through SGLang's own kernels."""

from __future__ import annotations

import json
import subprocess
import sys

import releases
from conftest import TEST


def test_exempt_and_inert_leave_the_same_pool(tmp_path):
    tree = releases.tree(releases.CRASHING, tmp_path / "tree")
    environment = releases.environment(tree, releases.CRASHING, TRITON_INTERPRET="1")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(TEST / "draft_pools.py")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["differ"] == 0
    # Conv states were moved, and inert tracking did write: into the dummy slot.
    assert seen["moved"] > 30 and seen["slot 0"] > 10, seen
