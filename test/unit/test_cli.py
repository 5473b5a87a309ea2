"""``inkling-sconv`` on real trees: what it says, what it exits with, and what git makes of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import releases
import variants
from inkling_sconv import cli
from inkling_sconv.codemod import guard, shape
from inkling_sconv.codemod.shape import Shape
from inkling_sconv.probe import contract
from inkling_sconv.probe.backend import State
from test_fixes import ALL, HARMS
from test_releases import CLASS, STATES
from typer.testing import CliRunner, Result

NAME = Path("python") / releases.BACKEND
# What is broken in each state, by the upstream change that it belongs to.
BROKEN = {
    "untracked": ["#34043", "#34043", "#34184"],
    "guarded": [],
    "exempt": [],
    "crashing": ["#35042", "#34043, #35042", "#35042", "#34043", "0.5.22"],
}
LIMITS = {
    "untracked": {"ours, rule 9", "ours, rule 10", "0.5.20", "0.5.22", "ours"},
    "guarded": {"0.5.20", "0.5.22", "ours, rule 9", "ours, rule 10", "ours"},
    "exempt": {"ours, rule 9", "ours, rule 10", "ours"},
    "crashing": {"ours, rule 10", "0.5.20", "0.5.22", "ours"},
}


@pytest.fixture(autouse=True)
def author(monkeypatch, tmp_path_factory):
    """A git that knows who commits, and no configuration of this machine."""
    config = tmp_path_factory.mktemp("git") / "config"
    config.write_text(
        "[user]\n name = Ada\n email = ada@example.org\n[init]\n defaultBranch = main\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for name in ("SGLANG_PLUGINS", "INKLING_SCONV"):
        monkeypatch.delenv(name, raising=False)
    return config


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def one_line(result: Result, code: int = 2) -> str:
    assert result.exit_code == code, (result.output, result.exception)
    (line,) = result.stderr.splitlines()
    return line


def git(folder: Path, *arguments: str, code: int = 0) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout.decode(errors="replace")


def commit(folder: Path, text: bytes, message: str) -> None:
    (folder / NAME).write_bytes(text)
    git(folder, "add", "-f", str(NAME))
    git(folder, "commit", "-qm", message)


def crashing_text() -> bytes:
    return releases.backend_text(releases.CRASHING).encode()


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A git repository with the crashing fork in it; the other files are links to the release."""
    folder = tmp_path / "checkout"
    releases.fork("0.5.18", crashing_text().decode(), folder / "python")
    git(folder, "init", "-q")
    commit(folder, crashing_text(), "base")
    (folder / ".git/info/exclude").write_text("/python/*\n!/python/sglang/\n/python/sglang/*\n")
    return folder


@pytest.fixture
def driven(trees, monkeypatch) -> Callable[[str], list[list[str]]]:
    """Let doctor ask the process that a tree's tests share, in place of one of its own."""

    def _driven(name: str, own_text: bool = False) -> list[list[str]]:
        asked: list[list[str]] = []

        def fake(command: list[str], env: dict[str, str], **_: object):
            asked.append(command)
            folder = (Path(env["PYTHONPATH"].split(os.pathsep)[0]) / releases.BACKEND).parent
            seen = trees(name).play("checks", None, None if own_text else folder)
            return subprocess.CompletedProcess(command, 0, "SGLang says\n" + seen["output"], "")

        monkeypatch.setattr(cli, "subprocess", SimpleNamespace(run=fake))
        return asked

    return _driven


# ----------------------------------------------------------------------------------- doctor


@pytest.mark.parametrize("tree", releases.TREES)
def test_doctor(driven, tree, tmp_path):
    driven(tree)
    root = releases.tree(tree, tmp_path / "tree")
    result = run("doctor", "--json", root)
    report = json.loads(result.stdout)
    state = STATES[tree]
    assert report["state"] == state and report["backend"] == CLASS
    assert result.exit_code == report["exit"] == (0 if state in ("guarded", "exempt") else 1)
    assert len(report["rows"]) >= 15
    verdicts: dict[str, list[str]] = {}
    for row in report["rows"]:
        assert row["asked"] and row["seen"] and "\n" not in row["seen"]
        verdicts.setdefault(row["verdict"], []).append(row["change"])
    assert verdicts.get("broken", []) == BROKEN[state]
    # The zero-token and stale-row rules moved between releases; what is a limit stays one of these.
    assert set(verdicts.get("limit", [])) <= LIMITS[state]
    assert ("0.5.22" in verdicts["limit"]) == (state != "exempt")
    # Each row that a fix is for says so, and no other; it holds where the harm is not there.
    harms = {row["fix"]: row["verdict"] for row in report["rows"] if row["fix"]}
    assert [name for name in ALL if harms.pop(name) != "holds"] == HARMS[tree] and not harms

    shown = run("doctor", root)
    assert shown.exit_code == report["exit"]
    lines = shown.stdout.splitlines()
    assert f"state: {state}, driven on CPU tensors" in lines
    assert lines[-1].startswith("next: ")
    assert {"crashing": "apply --diff", "untracked": "0.5.18"}.get(state, "is safe") in lines[-1]
    table = re.sub(r"\W+", "", shown.stdout)
    for name in ALL:
        assert (re.sub(r"\W+", "", f"mended by {name}") in table) == (name in HARMS[tree])
    fast = "INKLING_SCONV=fast " if state == "guarded" else ""
    by_default = state in ("untracked", "crashing")
    setting = "" if by_default else f"{fast}INKLING_SCONV_FIXES={','.join(HARMS[tree])}"
    assert report["setting"] == setting and lines[-1].endswith(setting)

    static = json.loads(run("doctor", "--static", "--json", root).stdout)
    assert static["state"] == state and static["exit"] == report["exit"]
    assert "nothing was run" in static["how"]


@pytest.mark.parametrize(
    ("state", "left", "setting"),
    (
        ("untracked", ["draft-window"], ""),
        ("crashing", ["prefill-rows", "draft-state"], ""),
        (
            "crashing",
            ["prefill-tracking"],
            "INKLING_SCONV_FIXES=prefill-rows,prefill-tracking,draft-checkpoint,draft-window,"
            "draft-state",
        ),
        ("guarded", ["prefill-rows"], "INKLING_SCONV_FIXES=prefill-rows"),
        (
            "guarded",
            ["draft-window", "draft-checkpoint"],
            "INKLING_SCONV=fast INKLING_SCONV_FIXES=draft-checkpoint,draft-window",
        ),
        ("guarded", [], ""),
        ("unknown", ["prefill-rows"], ""),
    ),
)
def test_the_setting_has_what_is_on_by_default_too(state, left, setting):
    rows = [
        contract.Row(
            "", "", contract.Verdict.LIMIT if name in left else contract.Verdict.HOLDS, "", name
        )
        for name in [*ALL, ""]
    ]
    assert advice.advise_setting(rows, State(state)) == setting
    # What is named already is named again.
    if state == "guarded" and left:
        assert (
            advice.advise_setting(rows, State(state), {"draft-state"}) == f"{setting},draft-state"
        )


@pytest.mark.parametrize(
    ("setting", "left", "variables", "installed", "named"),
    (
        ("", [], {"INKLING_SCONV": "off"}, "", ""),
        ("", ["draft-window"], {}, "", ""),
        ("", ["draft-window"], {"INKLING_SCONV_FIXES": "none"}, "unset INKLING_SCONV_FIXES", ""),
        (
            "",
            ["draft-checkpoint"],
            {"INKLING_SCONV_DRAFT_EXTEND": "Inert"},
            "unset INKLING_SCONV_DRAFT_EXTEND",
            "",
        ),
        ("", ["draft-window"], {"INKLING_SCONV_DRAFT_EXTEND": "inert"}, "", ""),
        (
            "A=b",
            ["draft-window"],
            {"INKLING_SCONV_FIXES": "draft-checkpoint"},
            "set A=b",
            "set A=b",
        ),
        (
            "A=b",
            ["draft-window"],
            {"INKLING_SCONV": "off", "SGLANG_PLUGINS": "other"},
            "unset SGLANG_PLUGINS and INKLING_SCONV, set A=b",
            "set A=b",
        ),
    ),
)
def test_the_last_line_of_doctor(monkeypatch, setting, left, variables, installed, named):
    for name in ("INKLING_SCONV", "INKLING_SCONV_FIXES", "INKLING_SCONV_DRAFT_EXTEND"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    rows = [{"fix": name, "verdict": "limit" if name in left else "holds"} for name in ALL]
    report = {"state": "guarded", "tree": "T", "exit": 0, "rows": rows, "setting": setting}
    for more, advice in (({"plugin": "loaded"}, installed), ({}, named)):
        nothing = "nothing: it starts and is safe"
        safe = f"it starts and is safe; for more accepted tokens (docs/fixes.md), {advice}"
        assert cli._next({**report, **more}) == (safe if advice else nothing)
    # A tree that was named is not mended by variables, if an edit mends it.
    crashing = {**report, "state": "crashing", "exit": 1}
    apply = "inkling-sconv apply --diff T"
    assert cli._next(crashing) == apply
    assert cli._next({**crashing, "plugin": ""}) == (
        f"{installed}, or {apply}" if installed else apply
    )


def inkling(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    code = "from inkling_sconv.__main__ import command; command()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )


def test_doctor_in_a_process_of_its_own(tmp_path):
    root = releases.tree(releases.CRASHING, tmp_path / "tree")
    environment = releases.environment(root, releases.CRASHING, COLUMNS="200")
    done = inkling("doctor", root, **environment)
    assert done.returncode == 1 and done.stderr == "", done.stderr
    assert "state: crashing, driven on CPU tensors" in done.stdout
    assert "'NoneType' object has no" in done.stdout and "plugin:" not in done.stdout
    assert done.stdout.splitlines()[-1] == f"next: inkling-sconv apply --diff {root}"


def test_doctor_of_a_wheel(tmp_path):
    release = releases.release("0.5.22")
    wheel = tmp_path / "sglang-0.5.22-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in release.rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                archive.write(path, path.relative_to(release))
    done = inkling("doctor", "--json", wheel, **releases.environment(tmp_path, "0.5.22"))
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["state"] == "exempt" and len(report["rows"]) >= 15
    assert not Path(report["tree"]).exists()


def test_doctor_of_the_installed_sglang(tmp_path):
    root = releases.tree(releases.CRASHING, tmp_path / "tree")
    environment = releases.environment(root, releases.CRASHING, INKLING_SCONV_FIXES=",".join(ALL))
    done = inkling("doctor", "--json", **environment)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["tree"] == str(root)
    assert report["state"] == "grafted" and report["bare"] == "crashing"
    assert report["plugin"] == (
        f"loaded by servers, INKLING_SCONV=auto, INKLING_SCONV_FIXES={','.join(ALL)}"
    )
    assert {row["fix"] for row in report["rows"] if row["verdict"] == "holds"} >= set(ALL)


def test_doctor_of_an_installed_sglang_that_the_fixes_are_for():
    root = releases.release("0.5.17")
    fixed = set()
    # By default all of them: then the runner's captures have metadata, and the method's own need of
    # it is no harm.
    for value, code in (("", 0), ("none", 1), ("prefill-rows", 1), ("prefill-tracking", 1)):
        environment = releases.environment(root, "0.5.17", INKLING_SCONV_FIXES=value)
        done = inkling("doctor", "--json", **environment)
        report = json.loads(done.stdout)
        assert report["state"] == "untracked" and done.returncode == report["exit"] == code
        verdicts = {row["asked"]: row["verdict"] for row in report["rows"]}
        tracked = value in ("", "prefill-tracking")
        assert verdicts[contract.SCATTER] == ("limit" if tracked else "broken")
        if value in ("", "none"):
            fixed ^= {r["fix"] for r in report["rows"] if r["fix"] and r["verdict"] == "holds"}
    assert fixed == set(ALL)


@pytest.mark.parametrize(
    ("module", "error", "word"),
    (
        ("torch", "ModuleNotFoundError(\"No module named 'torch'\")", "pip install torch,"),
        (
            "msgspec",
            "ModuleNotFoundError(\"No module named 'msgspec.json'\")",
            "pip install msgspec,",
        ),
        (
            "torch",
            "ImportError(\"cannot import name 'x' from 'torch' (/a/b)\")",
            "pip install torch in the version that this SGLang pins",
        ),
        ("torch", "ImportError('libcuda.so.1: no such file')", "doctor --static"),
    ),
)
def test_a_dependency_that_is_not_there(module, error, word, tmp_path):
    (tmp_path / f"{module}.py").write_text(f"raise {error}\n")
    root = releases.tree(releases.CRASHING, tmp_path / "tree")
    environment = releases.environment(root, releases.CRASHING)
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"
    done = inkling("doctor", root, **environment)
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr
    state, following = done.stdout.splitlines()
    assert state.startswith("state: unknown (") and error.split("(")[0] in state
    assert "lib" in state or f"'{module}" in state
    assert following.startswith("next: ") and word in following
    assert following.endswith(f"inkling-sconv doctor --static {root}")


def test_what_is_no_tree(tmp_path):
    assert "no such file" in one_line(run("doctor", tmp_path / "nowhere"))
    assert "no SGLang here" in one_line(run("doctor", tmp_path))
    (tmp_path / "broken.whl").write_bytes(b"not a zip")
    assert "not a wheel" in one_line(run("doctor", tmp_path / "broken.whl"))
    for command in ("apply", "export", "revert"):
        assert "a wheel is not edited" in one_line(run(command, tmp_path / "broken.whl"))
        assert "wheel" not in run(command, "--help").stdout
    assert "wheel" in run("doctor", "--help").stdout
    (tmp_path / "sglang/srt").mkdir(parents=True)
    for command in ("doctor", "doctor --static", "apply", "export", "revert"):
        assert "no Inkling backend" in one_line(run(*command.split(), tmp_path))


def test_a_fork_that_moved_the_file(driven, tmp_path):
    root = releases.fork("0.5.18", "", tmp_path / "tree")
    (root / releases.BACKEND).unlink()
    moved = root / "sglang" / "srt" / "layers" / "attention" / "fork_backend.py"
    moved.write_bytes(crashing_text())
    assert json.loads(run("doctor", "--static", "--json", root).stdout)["state"] == "crashing"
    asked = driven(releases.CRASHING)
    run("doctor", root)
    assert asked[0][-1] == "sglang.srt.layers.attention.fork_backend"


def test_what_keeps_the_plugin_out(driven, monkeypatch):
    driven(releases.CRASHING, own_text=True)

    def plugin() -> str:
        return json.loads(run("doctor", "--json").stdout)["plugin"]

    assert plugin() == "loaded by servers, INKLING_SCONV=auto"
    monkeypatch.setenv("SGLANG_PLUGINS", "other, inkling_sconv")
    monkeypatch.setenv("INKLING_SCONV", "off")
    assert plugin() == "loaded by servers, INKLING_SCONV=off"
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert plugin() == "kept out by SGLANG_PLUGINS; add inkling_sconv to it"
    monkeypatch.setattr("inkling_sconv.plugin.entry_points", lambda group: [])
    assert "entry point is missing" in plugin()


# ------------------------------------------------------------------------------------ apply


def test_apply_and_revert(driven, checkout):
    driven(releases.CRASHING)
    file = checkout / NAME
    diff = run("apply", "--diff", checkout)
    assert (
        diff.exit_code == 0 and "+        if prefix_lens is None and on_graph_path:" in diff.stdout
    )
    check = run("apply", "--check", checkout)
    assert check.exit_code == 1 and "would be rewritten" in check.stdout
    assert file.read_bytes() == crashing_text() and git(checkout, "status", "--porcelain") == ""

    applied = run("apply", checkout)
    assert applied.exit_code == 0 and "state: guarded" in applied.stdout
    assert applied.stdout.splitlines()[-1] == "next: git diff; commit it; undo: revert"
    assert git(checkout, "status", "--porcelain") == f" M {NAME}\n"
    assert run("doctor", checkout).exit_code == 0

    text = file.read_bytes()
    again = run("apply", checkout)
    assert again.exit_code == 0 and "nothing to do" in again.stdout
    assert run("apply", "--check", checkout).exit_code == 0
    assert file.read_bytes() == text
    assert run("revert", checkout).exit_code == 0
    assert file.read_bytes() == crashing_text() and git(checkout, "status", "--porcelain") == ""
    assert "nothing to take back" in one_line(run("revert", checkout))


def test_apply_and_revert_without_git(driven, tmp_path):
    driven(releases.CRASHING)
    root = releases.tree(releases.CRASHING, tmp_path / "tree")
    file = root / releases.BACKEND
    before = sorted(p.name for p in file.parent.iterdir())
    assert run("apply", root).exit_code == 0 and file.read_bytes() != crashing_text()
    assert run("revert", root).exit_code == 0 and file.read_bytes() == crashing_text()
    assert sorted(p.name for p in file.parent.iterdir()) == before


def test_the_diff_is_a_patch(checkout):
    patch = run("apply", "--diff", checkout).stdout
    subprocess.run(["git", "-C", str(checkout), "apply", "-"], input=patch.encode(), check=True)
    assert shape.read_shape((checkout / NAME).read_bytes()) is Shape.GUARDED


def test_apply_is_taken_back_where_it_does_not_heal(driven, checkout):
    driven(releases.CRASHING)
    text = variants.before_live("self.fork_state.shape")(crashing_text().decode()).encode()
    commit(checkout, text, "another crash")
    line = one_line(run("apply", checkout))
    assert "put back: after the edit it is unknown" in line and "fork_state" in line
    assert (checkout / NAME).read_bytes() == text and git(checkout, "status", "--porcelain") == ""


def test_apply_refuses_in_one_line(checkout):
    text = variants.before_live("count = lambda: forward_batch.extend_prefix_lens.shape[0]")(
        crashing_text().decode()
    ).encode()
    (checkout / NAME).write_bytes(text)
    line = one_line(run("apply", checkout))
    assert "an inner function reads" in line and "not touched. By hand: " in line
    assert (checkout / NAME).read_bytes() == text


@pytest.mark.parametrize("tree", ("0.5.17",))
def test_apply_inert_fill(driven, tree, tmp_path):
    driven(tree)
    root = releases.fork(tree, releases.backend_text(tree), tmp_path / "tree")
    assert "--inert-fill adds them" in one_line(run("apply", root))
    result = run("apply", "--inert-fill", root)
    assert result.exit_code == 0 and "state: guarded" in result.stdout
    assert run("revert", root).exit_code == 0
    assert (root / releases.BACKEND).read_text() == releases.backend_text(tree)


@pytest.mark.parametrize("version", [t for t, s in STATES.items() if s in ("guarded", "exempt")])
def test_a_healthy_release_is_left_alone(version):
    root = releases.release(version)
    for command in ("apply", "apply --check", "export"):
        result = run(*command.split(), root)
        assert result.exit_code == 0 and "guard is there" in result.output


# ----------------------------------------------------------------------------------- export


def fixed(text: bytes, place: Path) -> bytes:
    return guard.add_guard(text, format_as=place).text


@pytest.mark.parametrize("kind", ("LF", "CRLF", "latin-1"))
def test_export_and_am(checkout, kind, tmp_path):
    edit = {"CRLF": variants.newlines("\r\n"), "latin-1": variants.latin_1}.get(kind, str.encode)
    text = edit(crashing_text().decode())
    git(checkout, "config", "core.autocrlf", "false")
    if kind != "LF":
        commit(checkout, text, kind)
    head, index = git(checkout, "rev-parse", "HEAD"), git(checkout, "ls-files", "--stage")
    patch = tmp_path / "fix.patch"
    result = run("export", checkout, "-o", patch)
    assert result.exit_code == 0 and result.stderr == ""
    following = result.stdout.splitlines()[-1]
    assert following.startswith("next: git am")
    assert (checkout / NAME).read_bytes() == text and git(checkout, "rev-parse", "HEAD") == head
    assert git(checkout, "ls-files", "--stage") == index

    git(checkout, *following.removeprefix("next: git ").split())
    assert (checkout / NAME).read_bytes() == fixed(text, checkout / NAME)
    assert git(checkout, "status", "--porcelain", "-uno") == ""
    message = git(checkout, "log", "-1", "--format=%an <%ae>%n%B")
    assert message.startswith("Ada <ada@example.org>\nFix Inkling")
    for word in ("Problem:", "Cause:", "Fix:", "How to test:"):
        assert f"\n{word} " in message


@pytest.mark.parametrize(
    "setting",
    (
        "diff.noprefix=true",
        "format.noprefix=true",
        "diff.mnemonicPrefix=true",
        "format.attach=true",
        "format.coverLetter=true",
        "color.ui=always",
        "diff.external=false",
        "format.pretty=oneline",
        "core.autocrlf=true",
        "diff.context=0",
        "format.outputDirectory=nowhere",
        "commit.gpgSign=true",
    ),
)
def test_export_whatever_git_is_set_to(checkout, author, setting, tmp_path):
    name, value = setting.split("=")
    git(tmp_path, "config", "--file", str(author), name, value)
    patch = tmp_path / "fix.patch"
    assert run("export", checkout, "-o", patch).exit_code == 0
    git(tmp_path, "config", "--file", str(author), "--unset", name)
    git(checkout, "am", str(patch))
    assert shape.read_shape((checkout / NAME).read_bytes()) is Shape.GUARDED


def test_export_of_a_tree_outside_git(checkout, tmp_path):
    root = releases.tree(releases.CRASHING, tmp_path / "tree")
    result = run("export", root)
    assert result.exit_code == 0
    patch = tmp_path / "fix.patch"
    patch.write_bytes(result.stdout_bytes)
    git(checkout, "am", str(patch))
    assert shape.read_shape((checkout / NAME).read_bytes()) is Shape.GUARDED


def test_export_leaves_out_what_is_not_committed(checkout, tmp_path):
    (checkout / NAME).write_bytes(crashing_text() + b"# loose\n")
    result = run("export", checkout)
    assert result.exit_code == 0 and "uncommitted" in result.stderr
    assert b"# loose" not in result.stdout_bytes


def test_branch_and_cherry_pick(checkout):
    git(checkout, "checkout", "-qb", "work")
    commit(checkout, crashing_text() + b"\n\n# work\n", "work")
    result = run("export", checkout, "--branch", "fix", "--base", "main")
    assert result.exit_code == 0
    made, following = result.stdout.splitlines()
    assert made.startswith("branch fix: ") and following.startswith("next: git cherry-pick ")
    assert git(checkout, "branch", "--show-current") == "work\n"
    assert git(checkout, "rev-parse", "fix~1") == git(checkout, "rev-parse", "main")
    assert git(checkout, "diff", "--name-only", "main", "fix") == f"{NAME}\n"
    git(checkout, "cherry-pick", following.split()[3].rstrip(","))
    text = (checkout / NAME).read_bytes()
    assert shape.read_shape(text) is Shape.GUARDED and text.endswith(b"# work\n")
    assert "already exists" in one_line(
        run("export", checkout, "--branch", "fix", "--base", "main")
    )
    assert "nowhere" in one_line(run("export", checkout, "--branch", "b", "--base", "nowhere"))
    assert "nothing to export" in one_line(run("export", checkout, "--branch", "b"), code=0)
    line = one_line(run("export", checkout, "--branch", "a..b"))
    assert "a..b" in line


def test_a_later_merge_of_upstream_s_edit(checkout):
    upstream = releases.backend_text("0.5.18").encode()
    git(checkout, "checkout", "-qb", "upstream")
    commit(checkout, upstream, "#35042")
    git(checkout, "checkout", "-q", "main")
    run("export", checkout, "--branch", "fix")
    git(checkout, "merge", "-q", "fix")
    # Both wrote the same code under another comment, so git asks; upstream's is the one to take.
    assert "CONFLICT" in git(checkout, "merge", "upstream", code=1)
    git(checkout, "checkout", "--theirs", "--", str(NAME))
    git(checkout, "add", "-f", str(NAME))
    git(checkout, "commit", "-qm", "merge")
    assert (checkout / NAME).read_bytes() == upstream
    assert shape.read_shape(upstream) is Shape.GUARDED
    assert "nothing to do" in run("apply", checkout).stdout


def test_a_git_that_knows_no_author(checkout, author):
    author.write_text("[user]\n useConfigOnly = true\n")
    line = one_line(run("export", checkout))
    assert "git commit-tree failed" in line and "user.email" in line
    assert "user.email" in one_line(run("export", checkout, "--branch", "fix", "--base", "main"))
    assert git(checkout, "branch", "--list", "fix") == ""


def test_without_git(checkout, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git is not installed" in one_line(run("export", checkout))


# ------------------------------------------------------------------------------ what it costs


def test_a_server_imports_no_editor():
    code = """
import sys
from inkling_sconv.plugin import backend
from inkling_sconv import plugin
from inkling_sconv.probe import backend as probe
from inkling_sconv.ops import track_conv_indices
print(sorted({"libcst", "rich", "typer", "click"} & {name.split(".")[0] for name in sys.modules}))
print("inkling_sconv.cli" in sys.modules, "inkling_sconv.source" in sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": str(releases.ROOT / "python")}
    seen = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert seen.split("\n")[:2] == ["[]", "False False"]


@pytest.mark.parametrize("name", ("libcst", "rich", "typer"))
def test_without_the_extra(tmp_path, name):
    (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('x', name='{name}')\n")
    root = releases.tree(releases.CRASHING, tmp_path / "tree")
    path = f"{tmp_path}{os.pathsep}{releases.ROOT / 'python'}"
    done = inkling("doctor", "--static", root, PYTHONPATH=path)
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert f"{name} is not installed; pip install 'sglang-inkling-sconv[cli]'" in line
    assert shutil.which("git")
