"""docs/evidence.md is what docs/write_evidence.py makes of the records."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
from releases import ROOT


def test_the_page_is_not_stale(tmp_path):
    subprocess.run(
        [sys.executable, str(ROOT / "docs/write_evidence.py"), str(tmp_path / "page")], check=True
    )
    assert (tmp_path / "page").read_text() == (ROOT / "docs/evidence.md").read_text(), (
        "run make evidence"
    )


@pytest.fixture
def page():
    spec = importlib.util.spec_from_file_location("page", ROOT / "docs/write_evidence.py")
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    return page


def test_nothing_that_a_test_printed_is_taken(page, tmp_path):
    page.RECORDS = tmp_path / "records"
    page.RECORDS.mkdir()
    texts = "".join(
        f"<{tag}>/home/alice/model on host-7</{tag}>"
        for tag in ("failure", "error", "system-out", "system-err")
    )
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/shard-1.xml").write_text(
        f'<testsuite hostname="host-7"><testcase classname="a.TestB" name="c">{texts}</testcase>'
        "</testsuite>"
    )
    page.take(tmp_path / "logs")
    taken = (page.RECORDS / "shard-1.xml").read_text()
    assert "TestB" in taken and "alice" not in taken and "host-7" not in taken


def test_a_soak_is_shown_once_it_was_recorded(page, tmp_path):
    for record in page.RECORDS.iterdir():
        if record.name != "soak.json":
            (tmp_path / record.name).write_bytes(record.read_bytes())
    page.RECORDS = tmp_path
    assert "## Soak" not in "\n".join(page.page())
    pools = {"full": {"available": 3072, "evictable": 0, "used": 0}}
    record = {
        "requests": 20000,
        "seconds": 240.4,
        "ends": {"whole": 18400, "aborted": 1590, "closed": 8, "failed": 2},
        "retracted": 70,
        "most running": 8,
        "most queued": 24,
        "rescored": {"differing": 0, "compared": 9000, "detail": "700 answers, 600 texts"},
        "start": {"pools": pools},
        "end": {"pools": pools},
        "gpu": [2**30] * 9 + [2**30 + 2**20],
        "resident": [3 * 2**30] * 10,
    }
    # A load that failed leaves a part of the record.
    (tmp_path / "soak.json").write_text(json.dumps(record))
    assert "## Soak" not in "\n".join(page.page())
    record["killed"] = {"cut off": 32, "seconds": 1.34, "server ended after": 2.0, "error": "x"}
    record["restarted"] = {"answers": 24, "the same": 24}
    (tmp_path / "soak.json").write_text(json.dumps(record))
    shown = "\n".join(page.page())
    for line in (
        "| requests | 20000 in 240 s |",
        "| aborted by their client, streams left | 1590, 8 |",
        "| retracted | 70 |",
        "| rescored by a cold prefill: floats that differ | 0 of 9000 (700 answers, 600 texts) |",
        "| free full slots, before and after | 3072, 3072 |",
        "| GPU memory, MiB, after a tenth and at the end | 1024, 1025 |",
        "| `kill -9` of the scheduler | 32 requests got an error within 1.3 s |",
        "| after a restart | 24 of 24 answers the same |",
    ):
        assert line in shown, line
