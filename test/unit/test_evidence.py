"""docs/evidence.md is what benchmark/write_evidence.py makes of the records."""

import json

import pytest
import write_evidence
from releases import ROOT

RELEASE = "0.5.17"


def test_the_page_is_not_stale():
    page = "\n".join(write_evidence.make_page()).rstrip("\n") + "\n"
    assert page == (ROOT / "docs/evidence.md").read_text(), "run make evidence"


def test_the_records_are_small():
    files = [path for path in write_evidence.RECORDS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 100_000
    for picture in (ROOT / "docs").glob("*.svg"):
        assert picture.stat().st_size <= 80_000, picture


@pytest.fixture
def records(monkeypatch, tmp_path):
    monkeypatch.setattr(write_evidence, "RECORDS", tmp_path / "records")
    (tmp_path / "records").mkdir()
    return tmp_path / "records"


def test_what_is_taken_names_no_machine_and_no_path(records, tmp_path):
    logs = tmp_path / "logs/shard"
    logs.mkdir(parents=True)
    (logs / "machine.json").write_text(json.dumps({"sglang": RELEASE}))
    (logs / "verify.json").write_text(json.dumps({"log": "/home/alice/x/server.log"}))
    cases = "".join(
        f'<testcase classname="a.TestB" name="{name}" time="1.5">{child}</testcase>'
        for name, child in (("c", ""), ("d", "<skipped/>"), ("e", "<failure>/home/alice</failure>"))
    )
    (logs / "junit.xml").write_text(f'<testsuite hostname="host-7">{cases}</testsuite>')
    assert write_evidence.take_records(tmp_path / "logs") == records / RELEASE
    assert json.loads((records / RELEASE / "runs.json").read_text()) == {
        "TestB": {"tests": 3, "failed": ["e"], "skipped": 1, "seconds": 4.5}
    }
    everything = "".join(path.read_text() for path in (records / RELEASE).iterdir())
    assert "server.log" in everything and "alice" not in everything and "host-7" not in everything


def test_a_column_per_release_and_bold_where_floats_differ(records):
    one = {"compared": 838, "differing": 0, "largest": 0.0}
    other = {"compared": 838, "differing": 246, "largest": 1.63}
    for release, comparison in ((RELEASE, one), ("0.5.23", other)):
        (records / release).mkdir()
        text = json.dumps({"prefill-made hit": comparison})
        (records / release / "mtp-installed.json").write_text(text)
    page = "\n".join(write_evidence.make_page())
    assert "| server | compared | SGLang 0.5.23 | SGLang 0.5.17 |" in page
    row = "| as published, plugin, MTP | prefill-made hit | **246 of 838**, 1.63 | 0 of 838 |"
    assert row in page
    assert "## Soak" not in page and "## A decode step" not in page


def test_a_soak_that_failed_is_not_shown(records):
    (records / RELEASE).mkdir()
    record = json.loads((ROOT / "docs/evidence" / RELEASE / "soak.json").read_text())
    soak = records / RELEASE / "soak.json"
    soak.write_text(json.dumps(record))
    assert "## Soak" in "\n".join(write_evidence.make_page())
    del record["killed"]
    soak.write_text(json.dumps(record))
    assert "## Soak" not in "\n".join(write_evidence.make_page())
