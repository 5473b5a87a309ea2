"""What is installed, what it costs a server of another model, and ``python -m inkling_sconv``."""

import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib.metadata import requires
from pathlib import Path

import inkling_sconv
import pytest
import releases
import wrapt
from inkling_sconv.errors import make_line
from inkling_sconv.plugin import fixes, settings
from packaging.requirements import Requirement
from test_releases import check_log

PACKAGE = Path(inkling_sconv.__file__).parent


def test_the_only_dependency_is_wrapt():
    needed = [Requirement(line) for line in requires("sglang-inkling-sconv")]
    assert [r.name for r in needed if r.marker is None] == ["wrapt"]
    assert not {r.name for r in needed} & {"sglang", "torch", "triton"}


def test_the_wheel_is_small_and_whole(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(tmp_path), str(releases.ROOT)], check=True)
    (wheel,) = tmp_path.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        assert sum(info.file_size for info in archive.infolist()) < 1_000_000
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    info = f"sglang_inkling_sconv-{inkling_sconv.__version__}.dist-info/"
    assert Parser().parsestr(files[f"{info}METADATA"])["Version"] == inkling_sconv.__version__
    assert "inkling_sconv = inkling_sconv.plugin:register" in files[f"{info}entry_points.txt"]
    tests = releases.ROOT / "test" / "registered" / "inkling"
    assert {name for name in files if name.endswith(".py")} == {
        *(f"inkling_sconv/{path.relative_to(PACKAGE)}" for path in PACKAGE.rglob("*.py")),
        *(f"inkling_sconv/fork_ci/registered/{path.name}" for path in tests.glob("*.py")),
    }
    assert all(name.startswith(("inkling_sconv/", info)) for name in files)


def test_register_takes_under_5_ms_and_imports_no_torch():
    code = """
import time, sys
from inkling_sconv import plugin
start = time.perf_counter()
plugin.register()
print((time.perf_counter() - start) * 1e3)
print(sorted({"torch", "sglang", "libcst", "rich", "typer"} & set(sys.modules)))
"""
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    milliseconds, heavy = output.splitlines()
    assert float(milliseconds) < 5 and heavy == "[]"


@pytest.mark.parametrize(
    ("files", "words"),
    (
        ({}, "SGLang is not installed for "),
        ({"": ""}, "this SGLang has no plugins ("),
        ({"": "", "srt": ""}, "this SGLang has no plugins ("),
        ({"": "", "srt": "", "srt/plugins": ""}, "the entry point is missing; "),
        ({"": "import nowhere"}, "does not import: No module named 'nowhere'; install what it "),
        ({"": "raise ValueError('taken')"}, "does not import: ValueError: taken; install the vers"),
    ),
)
def test_status_says_why_a_server_would_not_load_it(tmp_path, files, words):
    """A Python that sees our package, wrapt and an SGLang of these files only."""
    shutil.copytree(PACKAGE, tmp_path / "inkling_sconv")
    shutil.copytree(Path(wrapt.__file__).parent, tmp_path / "wrapt")
    for folder, text in files.items():
        (tmp_path / "sglang" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "sglang" / folder / "__init__.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-S", "-m", "inkling_sconv"],
        env={"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert words in line


def test_status_kept_out_by_sglang_plugins(drive):
    seen = drive(releases.CRASHING, "status", SGLANG_PLUGINS="other")
    assert seen["code"] == 1 and "SGLANG_PLUGINS keeps this plugin out" in seen["output"]


def test_status_of_the_crashing_fork(drive):
    seen = drive(releases.CRASHING, "status")
    line, *fixes = seen["output"].splitlines()
    assert seen["code"] == 0 and "is crashing" in line and "replaced" in line
    check_log([f"WARNING {fix}" for fix in fixes], releases.CRASHING)


@pytest.mark.parametrize("value", ("0", "false", "No", "none", "OFF"))
def test_words_that_turn_it_off(monkeypatch, caplog, value):
    monkeypatch.setenv("INKLING_SCONV", value)
    assert settings.read_mode() is settings.Mode.OFF and caplog.records == []
    assert settings.list_obstacles({"draft-window"}, "") == ["INKLING_SCONV"]


def test_a_log_line_is_one_line_without_escape_sequences(monkeypatch, caplog):
    monkeypatch.setenv("INKLING_SCONV_FIXES", "none,\x1b[31mred\n,\u202eb,\udcff")
    monkeypatch.setenv("INKLING_SCONV", "\x1b]0;x\x07")
    fixes.install_fixes([], set())
    settings.read_mode()
    assert len(caplog.records) == 2 and "\\x1b[31mred" in caplog.text
    assert all(record.getMessage().isprintable() for record in caplog.records)
    assert make_line("a\u00e9 \t\x1b\U0001f600") == "a\u00e9 \\t\\x1b\U0001f600"
