"""docs/evidence.md is what docs/write_evidence.py makes of the records."""

from __future__ import annotations

import subprocess
import sys

from releases import ROOT


def test_the_page_is_not_stale(tmp_path):
    subprocess.run(
        [sys.executable, str(ROOT / "docs/write_evidence.py"), str(tmp_path / "page")], check=True
    )
    assert (tmp_path / "page").read_text() == (ROOT / "docs/evidence.md").read_text(), (
        "run make evidence"
    )
