"""``make upstream-suites`` on a checkout that is made here, with nothing of SGLang in it."""

import json
import os
import socket
import sys
from pathlib import Path

import gpu_test
import pytest
import suites
from inkling_sconv.errors import UserError
from inkling_sconv.proof.architecture import VOCABULARY
from test_gpu_test import run_make

BITEXACT, INKLING, SMALL = suites.SUITES
# What a suite of SGLang's reads, written down for the test to see.
PASSES = """
import os, json, pathlib, shutil, sglang, inkling_sconv

def test_it():
    names = ("INKLING_TEST_MODEL_PATH", "INKLING_TEST_MODEL_REVISION", "INKLING_SCONV")
    seen = {name: os.environ.get(name) for name in names}
    model = pathlib.Path(seen["INKLING_TEST_MODEL_PATH"])
    seen["config"] = (model / "config.json").is_file()
    seen["command"] = shutil.which("sglang")
    seen["sglang"], seen["ours"] = sglang.__file__, inkling_sconv.__file__
    pathlib.Path(os.environ["SEEN"]).write_text(json.dumps(seen))
"""
DIVERGES = """
class TestBitExact:
    def test_hit(self):
        print("avg_kl_div=0.0")

    def test_cold(self):
        print("kl_divs=[1.0]", "avg_kl_div=4.4e-06", "avg_kl_div=nan", sep="\\n")
        assert 0
"""
FAILS = "def test_it():\n    assert 0\n"
SKIPS = "import pytest\n\n@pytest.mark.skip('needs a B200')\ndef test_it(): pass\n"


@pytest.fixture
def tree(tmp_path) -> Path:
    tree = tmp_path / "checkout"
    (tree / "python/sglang/test").mkdir(parents=True)
    (tree / "test/registered/models").mkdir(parents=True)
    for package in ("python/sglang", "python/sglang/test"):
        (tree / package / "__init__.py").touch()
    prompts = tmp_path / "prompts"
    (tree / "python/sglang/test/kl_test_utils.py").write_text(f"CACHE_DIR = {str(prompts)!r}\n")
    return tree


@pytest.fixture
def run(tree, tmp_path, capfd):
    """Runs the suites that are given as texts; gives the exit status, the lines, what was seen."""

    def run(texts: dict[str, str], **variables: str) -> tuple[int, list[str], dict]:
        for name, text in texts.items():
            (tree / "test/registered/models" / name).write_text(text)
        before = list_files(tree)
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("INKLING_", "SGLANG_"))}
        seen = tmp_path / "seen"
        code = suites.run(tree, {**clean, "SEEN": str(seen), **variables}, tmp_path)
        assert list_files(tree) == before
        lines = capfd.readouterr().out.splitlines()
        return code, lines, json.loads(seen.read_text()) if seen.is_file() else {}

    return run


def list_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def list_lines(lines: list[str], verdict: str) -> list[str]:
    return [line for line in lines if line.startswith(f"{verdict}: ")]


def test_found_run_and_passed_on_a_tiny_checkpoint(run, tree, tmp_path):
    code, lines, seen = run({BITEXACT: PASSES}, PATH="/usr/bin")
    assert code == 0
    assert list_lines(lines, "found") == [f"found: test/registered/models/{BITEXACT}"]
    assert list_lines(lines, "not found") == [f"not found: {INKLING}", f"not found: {SMALL}"]
    (line,) = list_lines(lines, "passed")
    assert "1 passed, 0 failed, 0 skipped" in line
    assert seen["config"] and seen["INKLING_SCONV"] == "auto"
    assert seen["INKLING_TEST_MODEL_REVISION"] == ""
    (line,) = list_lines(lines, "checkpoint")
    assert f"above {VOCABULARY - 1}" in line
    assert seen["command"] == str(Path(sys.executable).with_name("sglang"))
    assert seen["sglang"] == str(tree / "python/sglang/__init__.py")
    assert seen["ours"] == str(gpu_test.ROOT / "python/inkling_sconv/__init__.py")
    # The checkpoint and its prompts were for this run.
    assert not Path(seen["INKLING_TEST_MODEL_PATH"]).exists()
    assert list_files(tmp_path / "prompts") == []


def test_the_user_s_checkpoint_is_used_and_kept(run, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    code, lines, seen = run({INKLING: PASSES}, INKLING_TEST_MODEL_PATH=str(tmp_path))
    assert code == 0 and f"checkpoint: {tmp_path}" in lines
    assert seen["INKLING_TEST_MODEL_PATH"] == str(tmp_path)
    assert seen["INKLING_TEST_MODEL_REVISION"] is None
    assert (tmp_path / "config.json").is_file() and not (tmp_path / "prompts").exists()


def test_one_that_fails_does_not_stop_the_next(run, tmp_path):
    texts = {BITEXACT: FAILS, INKLING: SKIPS, SMALL: PASSES}
    (tmp_path / "config.json").write_text("{}")
    code, lines, _ = run(texts, INKLING_TEST_MODEL_PATH=str(tmp_path))
    assert code == 1
    for verdict, name in (("failed", BITEXACT), ("skipped", INKLING), ("passed", SMALL)):
        (line,) = list_lines(lines, verdict)
        assert name in line, verdict


@pytest.mark.parametrize("text", ("import nowhere\n", "", "import os\nos._exit(7)\n"))
def test_one_without_a_test_fails(run, tmp_path, text):
    code, lines, _ = run({INKLING: text}, INKLING_TEST_MODEL_PATH=str(tmp_path))
    assert code == 1 and len(list_lines(lines, "failed")) == 1


def test_none_is_there(run):
    with pytest.raises(UserError, match="has none of the suites"):
        run({})


def test_divergences_are_shown(run, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    code, lines, _ = run({BITEXACT: DIVERGES}, INKLING_TEST_MODEL_PATH=str(tmp_path))
    assert code == 1
    assert lines[-3].startswith("failed: ") and "1 passed, 1 failed, 0 skipped" in lines[-3]
    assert lines[-2:] == [
        "  TestBitExact::test_hit: avg_kl_div 0.0",
        "  TestBitExact::test_cold: avg_kl_div 4.4e-06, nan",
    ]


def test_a_server_in_the_place_of_theirs(run, tree):
    """The port is the checkout's to say."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"http://127.0.0.1:{other.getsockname()[1]}"
        text = f"DEFAULT_URL_FOR_TEST = {url!r}\nprint('a warning')\n"
        module = tree / "python/sglang/test/test_utils.py"
        module.write_text(text)
        with pytest.raises(UserError, match=f"^{url} answers already"):
            run({INKLING: PASSES})
    for other in (url, "", "http://127.0.0.1:port", "http://127.0.0.1:70000", "http://[", None):
        module.write_text(f"DEFAULT_URL_FOR_TEST = {other!r}\n")
        assert suites.find_other_server(suites.make_environment(tree, os.environ)) is None, other
    code, _, seen = run({INKLING: PASSES})
    assert code == 0 and seen


def test_without_the_command_that_starts_servers(run, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UserError, match=r"^no command sglang beside .*/python or on PATH"):
        run({INKLING: PASSES}, PATH="/usr/bin")


def test_no_prompts_can_be_written(run, tree):
    (tree / "python/sglang/test/kl_test_utils.py").write_text("import nowhere\n")
    with pytest.raises(UserError, match="KL helpers do not import") as caught:
        run({INKLING: PASSES})
    assert "\n" not in str(caught.value)


def test_no_checkout(tree, tmp_path):
    def line(*variables: str) -> str:
        code, line = run_make(*variables, target="upstream-suites")
        assert code == 2 and line.startswith("upstream-suites: ")
        return line

    assert "with SGLANG_DIR=..." in line()
    assert "no such folder" in line(f"SGLANG_DIR={tmp_path / 'none'}")
    assert "it has no python/sglang" in line(f"SGLANG_DIR={tmp_path}")
    assert "there is no GPU here" in line(f"SGLANG_DIR={tree}")
    (tree / "test").rename(tree / "tests")
    assert "it has no test" in line(f"SGLANG_DIR={tree}")
