"""``inkling-sconv`` on real trees: what it prints, its exit codes, and what git makes of it."""

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import attack
import pytest
import releases
import variants
from inkling_sconv import cli
from inkling_sconv.codemod.guard import add_guard
from inkling_sconv.codemod.shape import Shape, read_shape
from inkling_sconv.errors import Interrupted
from inkling_sconv.names import REFRESH
from inkling_sconv.plugin import advice
from inkling_sconv.probe import contract
from inkling_sconv.probe.backend import State
from inkling_sconv.trees import examine
from inkling_sconv.trees.tree import find_tree
from test_fixes import ALL, HARMS
from test_releases import CLASS, STATES
from typer.testing import CliRunner, Result

NAME = Path("python") / releases.BACKEND
CRASHING = variants.read_text(releases.CRASHING).encode()
# The upstream change that each broken row belongs to, by state; and what may be a limit: the
# zero-token and stale-row rules moved between releases.
BROKEN = {
    "untracked": ["#34043", "#34043", "#34184"],
    "crashing": ["#35042", "#34043, #35042", "#35042", "#34043", "0.5.22"],
}
LIMITS = {"ours, rule 9", "ours, rule 10", "0.5.20", "0.5.22", "ours"}


@pytest.fixture(autouse=True)
def author(monkeypatch, tmp_path_factory):
    """Give git an author, and keep this machine's configuration out."""
    config = tmp_path_factory.mktemp("git") / "config"
    config.write_text(
        "[user]\n name = Ada\n email = ada@example.org\n[init]\n defaultBranch = main\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for name in [name for name in os.environ if name.startswith(("INKLING_SCONV", "SGLANG_PLUG"))]:
        if name != "INKLING_SCONV_CACHE":
            monkeypatch.delenv(name)
    return config


def run(*arguments: object) -> Result:
    words = str(arguments[0]).split()
    return CliRunner().invoke(cli.app, [*words, *map(str, arguments[1:])])


def read_error(result: Result, code: int = 2) -> str:
    """Return the one line on stderr."""
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


def read(checkout: Path) -> bytes:
    return (checkout / NAME).read_bytes()


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A git repository with the crashing fork in it; the other files are links to the release."""
    folder = tmp_path / "checkout"
    releases.fork("0.5.18", CRASHING.decode(), folder / "python")
    git(folder, "init", "-q")
    commit(folder, CRASHING, "base")
    (folder / ".git/info/exclude").write_text("/python/*\n!/python/sglang/\n/python/sglang/*\n")
    return folder


@pytest.fixture
def share_process(trees, monkeypatch) -> Callable[..., list[list[str]]]:
    """Let doctor ask the process that a tree's tests share, in place of one of its own."""

    def share(name: str) -> list[list[str]]:
        commands: list[list[str]] = []

        def answer(command: list[str], env: dict[str, str], **_: object):
            commands.append(command)
            folder = (Path(env["PYTHONPATH"].split(os.pathsep)[0]) / releases.BACKEND).parent
            found = trees(name).play("checks", None, folder)
            return subprocess.CompletedProcess(command, 0, "SGLang says\n" + found["output"], "")

        monkeypatch.setattr(examine, "subprocess", SimpleNamespace(run=answer))
        return commands

    return share


# ----------------------------------------------------------------------------------- doctor


@pytest.mark.parametrize("tree", releases.TREES)
def test_doctor(share_process, tree, tmp_path):
    share_process(tree)
    root = releases.tree(tree, tmp_path / "tree")
    result = run("doctor --json", root)
    report = json.loads(result.stdout)
    state = STATES[tree]
    assert report["state"] == state and report["backend"] == CLASS
    assert result.exit_code == report["exit"] == int(state in BROKEN)
    assert len(report["rows"]) >= 15
    verdicts: dict[str, list[str]] = {"broken": [], "limit": []}
    for row in report["rows"]:
        assert row["asked"] and row["seen"] and "\n" not in row["seen"]
        verdicts.setdefault(row["verdict"], []).append(row["change"])
    assert verdicts["broken"] == BROKEN.get(state, []) and {*verdicts["limit"]} <= LIMITS
    assert ("0.5.22" in verdicts["limit"]) == (state != "exempt")
    # A row names its fix, and holds where the tree does not need it.
    harms = {row["fix"]: row["verdict"] for row in report["rows"] if row["fix"]}
    assert [name for name in ALL if harms.pop(name, "holds") != "holds"] == HARMS[
        tree
    ] and not harms
    # On the other states, what the tree needs is on by default.
    setting = f"INKLING_SCONV_FIXES={','.join(HARMS[tree])}" if state == "guarded" else ""
    assert report["setting"] == setting

    shown = run("doctor", root)
    lines = shown.stdout.splitlines()
    assert shown.exit_code == report["exit"]
    assert f"state: {state}, run on CPU tensors" in lines and lines[-1].startswith("next: ")
    assert {"crashing": "apply --diff", "untracked": "0.5.18"}.get(state, "is safe") in lines[-1]
    assert lines[-1].endswith(setting)
    # No terminal, so a line for each check, whatever its width.
    fixed = [line.split("; fixed by ")[1] for line in lines if "; fixed by " in line]
    assert sorted(fixed, key=ALL.index) == HARMS[tree]
    words = r"(holds|broken|limit): .+: .+"
    assert sum(bool(re.fullmatch(words, line)) for line in lines) == len(report["rows"])

    static = json.loads(run("doctor --static --json", root).stdout)
    assert static["state"] == state and static["exit"] == report["exit"]
    assert "nothing was run" in static["how"]


@pytest.mark.parametrize(
    ("state", "left", "named", "fixes"),
    (
        ("crashing", "draft-state", "", ""),
        # What is on by default, or named already, has to be named too.
        (
            "crashing",
            "prefill-tracking",
            "",
            "prefill-rows,prefill-tracking,draft-checkpoint,draft-window,draft-state",
        ),
        ("guarded", "prefill-rows", "draft-state", "prefill-rows,draft-state"),
        ("unknown", "prefill-rows", "", ""),
    ),
)
def test_the_variables_to_set(state, left, named, fixes):
    verdicts = dict.fromkeys(ALL, contract.Verdict.HOLDS) | {left: contract.Verdict.LIMIT}
    rows = [contract.Row("", "", verdict, "", fix) for fix, verdict in verdicts.items()]
    setting = advice.advise_setting(rows, State(state), {*named.split()})
    assert setting == (f"INKLING_SCONV_FIXES={fixes}" if fixes else "")


SAFE = "it starts and is safe. Optional, for more tokens a step (docs/fixes.md): "


@pytest.mark.parametrize(
    ("setting", "left", "variables", "advised"),
    (
        ("", "", "INKLING_SCONV=off", ""),
        ("", "draft-window", "", ""),
        ("", "draft-window", "INKLING_SCONV_FIXES=none", "unset INKLING_SCONV_FIXES"),
        (
            "",
            "draft-checkpoint",
            "INKLING_SCONV_DRAFT_EXTEND=Inert",
            "unset INKLING_SCONV_DRAFT_EXTEND",
        ),
        ("", "draft-window", "INKLING_SCONV_DRAFT_EXTEND=inert", ""),
        ("A=b", "draft-window", "INKLING_SCONV_FIXES=draft-checkpoint", "set A=b"),
        (
            "A=b",
            "draft-window",
            "INKLING_SCONV=off SGLANG_PLUGINS=other",
            "unset SGLANG_PLUGINS and INKLING_SCONV, set A=b",
        ),
    ),
)
def test_the_last_line_of_doctor(monkeypatch, tmp_path, setting, left, variables, advised):
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    (root := tmp_path / "sglang/srt").mkdir(parents=True)
    (root / "backend.py").write_bytes(CRASHING)

    def advise(state: str, *tree: Path) -> str:
        row = {"asked": "", "change": "", "seen": ""}
        rows = [{**row, "fix": left, "verdict": "limit" if left else "holds"}]
        if state == "crashing":
            rows.append({**row, "fix": "", "verdict": "broken"})
        report = {"state": state, "tree": "T", "backend": CLASS, "rows": rows, "setting": setting}
        monkeypatch.setattr(examine, "examine_tree", lambda tree, installed: dict(report))
        result = run("doctor", *tree)
        assert result.exit_code == int(state == "crashing"), result.output
        return result.stdout.splitlines()[-1].removeprefix("next: ")

    # No variable matters for a TREE, and an edit is better than a variable there.
    for tree, text in ((), advised), ((tmp_path,), f"set {setting}" if setting else ""):
        safe = f"{SAFE}{text}" if text else "nothing to do: it starts and is safe"
        assert advise("guarded", *tree) == safe
        edit = "inkling-sconv apply --diff T"
        assert advise("crashing", *tree) == (f"{text}, or {edit}" if text and not tree else edit)


def run_in_process(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    code = "from inkling_sconv.__main__ import command; command()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )


def test_doctor_of_a_wheel(tmp_path):
    root = releases.tree(releases.CRASHING, tmp_path / "tree")
    wheel = tmp_path / "sglang-0.5.18-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for folder, _, files in os.walk(root / "sglang", followlinks=True):
            for path in (Path(folder) / file for file in files if not file.endswith(".pyc")):
                archive.write(path, path.relative_to(root))
    environment = releases.environment(tmp_path, releases.CRASHING, COLUMNS="200")
    done = run_in_process("doctor", wheel, **environment)
    assert done.returncode == 1 and done.stderr == "", done.stderr
    assert "state: crashing, run on CPU tensors" in done.stdout
    assert "'NoneType' object has no" in done.stdout and "plugin:" not in done.stdout
    assert done.stdout.splitlines()[-1] == "next: unpack the wheel, and run doctor on the folder"
    assert f"{CLASS} in {wheel}" in " ".join(done.stdout.split())


@pytest.mark.parametrize(("tree", "fixes"), ((releases.CRASHING, ",".join(ALL)), ("0.5.17", "")))
def test_doctor_of_the_installed_sglang(tree, fixes, tmp_path):
    root = releases.tree(tree, tmp_path / "tree")
    environment = releases.environment(root, tree, INKLING_SCONV_FIXES=fixes)
    done = run_in_process("doctor", "--json", **environment)
    report = json.loads(done.stdout)
    assert report["tree"] == str(root) and done.returncode == report["exit"] == 0
    named = f", INKLING_SCONV_FIXES={fixes}" if fixes else ""
    assert report["plugin"] == f"loaded by servers, INKLING_SCONV=auto{named}"
    holding = {row["fix"] for row in report["rows"] if row["fix"] and row["verdict"] == "holds"}
    assert holding == {*ALL}
    if tree == releases.CRASHING:
        assert report["state"] == "grafted" and report["bare"] == "crashing"
    else:
        # With the runner's fix every capture has metadata: that the method needs it is no harm.
        verdicts = {row["asked"]: row["verdict"] for row in report["rows"]}
        assert report["state"] == "untracked" and verdicts[contract.SCATTER] == "limit"


@pytest.mark.parametrize(
    ("error", "advised"),
    (
        ("ModuleNotFoundError: No module named 'msgspec.json'", "pip install msgspec, or"),
        (
            "ImportError: cannot import name 'x' from 'torch' (/a/b)",
            "pip install torch (the version that this SGLang pins), or",
        ),
        ("ImportError: libcuda.so.1: no such file", "inkling-sconv doctor --static"),
    ),
)
def test_a_dependency_that_is_missing(error, advised, checkout, monkeypatch):
    done = subprocess.CompletedProcess([], 1, "", f"Traceback\n{error}\n")
    monkeypatch.setattr(examine, "subprocess", SimpleNamespace(run=lambda *_, **__: done))
    result = run("doctor", checkout)
    assert result.exit_code == 2
    state, following = result.stdout.splitlines()
    assert state == f"state: unknown ({error})"
    assert following.startswith(f"next: {advised}")
    assert following.endswith(f"inkling-sconv doctor --static {checkout / 'python'}")


def test_the_report_is_of_the_worst_class(checkout, monkeypatch):
    kept = {"setting": "", "why": "w"}
    backends = [
        {"name": "A", "state": "guarded", "rows": [], **kept},
        {"name": "B", "state": "unknown", "rows": [{"verdict": "broken"}], **kept},
    ]
    answer = json.dumps({"bare": ["crashing", "exempt"], "backends": backends})
    done = subprocess.CompletedProcess([], 0, answer, "")
    monkeypatch.setattr(examine, "subprocess", SimpleNamespace(run=lambda *_, **__: done))
    report = examine.examine_tree(find_tree(checkout), installed=True)
    found = [report[key] for key in ("backend", "state", "bare", "why")]
    assert found == ["B", "unknown", "exempt", "w"]


def test_a_path_that_is_no_tree(tmp_path):
    wheel = tmp_path / "broken.whl"
    wheel.write_bytes(b"not a zip")
    assert "no such file" in read_error(run("doctor", tmp_path / "nowhere"))
    assert "no SGLang here" in read_error(run("doctor", tmp_path))
    assert "cannot read the wheel" in read_error(run("doctor", wheel))
    with zipfile.ZipFile(tmp_path / "absent.whl", "w") as archive:
        archive.writestr("sglang/srt/__init__.py", "")
    assert f"{tmp_path}/absent.whl: no file" in read_error(run("doctor", tmp_path / "absent.whl"))
    for command in ("apply", "export", "revert"):
        assert "cannot edit a wheel" in read_error(run(command, wheel))
    (tmp_path / "sglang/srt").mkdir(parents=True)
    for command in ("doctor", "doctor --static", "apply", "export", "revert"):
        assert "no Inkling backend" in read_error(run(command, tmp_path))
    (tmp_path / "sglang/srt/one.py").write_text("def _refresh_track_conv_indices(): ...\n")
    result = run("doctor --static", tmp_path)
    assert result.exit_code == 2 and "\nnext: nothing to do: no Inkling backend" in result.stdout
    for name in ("one.py", "two.py"):
        (tmp_path / "sglang/srt" / name).write_bytes(CRASHING)
    assert "in several files" in read_error(run("doctor", tmp_path))


def make_wheel(path: Path, *, encrypted: bool) -> Path:
    """Write a wheel whose one file is encrypted, or damaged."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("sglang/srt/__init__.py", CRASHING)
    text = bytearray(path.read_bytes())
    if encrypted:
        for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            text[text.index(mark) + flags] |= 1
    else:
        text[200:300] = bytes(100)
    path.write_bytes(text)
    return path


def test_a_wheel_that_cannot_be_read(tmp_path):
    for encrypted in (True, False):
        wheel = make_wheel(tmp_path / "a.whl", encrypted=encrypted)
        for command in ("doctor", "doctor --static"):
            assert "cannot read the wheel (" in read_error(run(command, wheel))
    os.mkfifo(tmp_path / "fifo.whl")
    assert "not a regular file" in read_error(run("doctor", tmp_path / "fifo.whl"))


@pytest.mark.parametrize("kind", ("fifo", "loop", "folder"))
def test_a_backend_that_is_no_file(tmp_path, kind):
    file = tmp_path / NAME
    file.parent.mkdir(parents=True)
    if kind == "fifo":
        os.mkfifo(file)
    else:
        file.symlink_to(file.name) if kind == "loop" else file.mkdir()
    for command in ("doctor", "doctor --static", "apply", "apply --check", "export", "revert"):
        assert f"{file}: not a regular file" in read_error(run(command, tmp_path))
    # Nor is one looked into where the file has moved.
    file.rename(file.with_name("x.py"))
    file.with_name("fork.py").write_bytes(CRASHING)
    assert run("apply --check", tmp_path).exit_code == 1


INNER = {
    "doctor": "trees.examine.examine_tree",
    "apply": "cli.edit.lock_file",
    "revert": "cli.edit.lock_file",
    "export": "codemod.commit.make_mailbox",
    "ci-init": "fork_ci.copy.copy_into",
    "watch": "trees.watch.look_for_releases",
    "verify": "proof.verify.why_unavailable",
    "tiny": "proof.checkpoint.write_checkpoint",
}


@pytest.mark.parametrize("command", INNER)
def test_whatever_happens_is_one_line(checkout, monkeypatch, command):
    for error, line in (
        (RuntimeError("a\nb\x1b[31m"), "unforeseen RuntimeError: a\\nb\\x1b[31m; please report it"),
        (RecursionError("deep"), "unforeseen RecursionError: deep; please report it"),
        (Interrupted("interrupted by SIGTERM"), "interrupted by SIGTERM"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ):

        def fail(*_: object, error: BaseException = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(f"inkling_sconv.{INNER[command]}", fail)
        words = () if command in ("watch", "verify") else (checkout,)
        prefix = "inkling-sconv tiny" if isinstance(error, OSError) and command == "tiny" else ""
        assert read_error(run(command, *words)) == f"{prefix or 'inkling-sconv'}: {line}"


def test_a_wrong_command_line_is_one_line():
    for words in ("apply --nope", "nope", "verify --heads 99", "tiny --nope", "tiny"):
        assert read_error(run(words)).startswith("inkling-sconv")
    assert run("").exit_code == 2 and "Usage: " in run("").output


@pytest.mark.parametrize("output", (">/dev/full", ">&-", "| true"))
@pytest.mark.parametrize("words", ("doctor --static", "apply --diff", "--help", "--version"))
def test_an_output_that_takes_nothing(tmp_path, output, words):
    file = tmp_path / "\udcff" / NAME
    file.parent.mkdir(parents=True)
    file.write_bytes(CRASHING)
    if not words.startswith("--"):
        words = f"{words} {tmp_path}/*"
    code = "import time; from inkling_sconv.__main__ import command; time.sleep(0.2); command()"
    script = f"""set -o pipefail; "$0" -c "$1" {words} {output}"""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run(
        ["bash", "-c", script, sys.executable, code], capture_output=True, env=environment
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(b"inkling-sconv: ")
    # The same where the output takes everything, but not every character.
    done = subprocess.run(
        ["bash", "-c", script.removesuffix(output), sys.executable, code],
        capture_output=True,
        env=environment,
    )
    assert done.returncode == (words.startswith("doctor")) and done.stdout and not done.stderr


def test_a_fork_that_moved_the_file(share_process, tmp_path):
    root = releases.fork("0.5.18", "", tmp_path / "tree")
    (root / releases.BACKEND).unlink()
    moved = root / "sglang" / "srt" / "layers" / "attention" / "fork_backend.py"
    moved.write_bytes(CRASHING)
    assert json.loads(run("doctor --static --json", root).stdout)["state"] == "crashing"
    commands = share_process(releases.CRASHING)
    run("doctor", root)
    assert commands[0][-1] == "sglang.srt.layers.attention.fork_backend"


def test_whether_servers_load_the_plugin(monkeypatch):
    monkeypatch.setattr(examine, "examine_tree", lambda tree, installed: {"state": "unknown"})

    def read_plugin(**variables: str) -> str:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return json.loads(run("doctor --json").stdout)["plugin"]

    assert read_plugin() == "loaded by servers, INKLING_SCONV=auto"
    off = read_plugin(SGLANG_PLUGINS="other, inkling_sconv", INKLING_SCONV="off")
    assert off == "loaded by servers, INKLING_SCONV=off"
    out = read_plugin(SGLANG_PLUGINS="other")
    assert out == "kept out by SGLANG_PLUGINS; add inkling_sconv to it"
    monkeypatch.setattr("inkling_sconv.plugin.settings.entry_points", lambda group: [])
    assert "entry point is missing" in read_plugin()


# ------------------------------------------------------------------------------------ apply


def test_apply_and_revert(share_process, checkout):
    share_process(releases.CRASHING)
    diff = run("apply --diff", checkout)
    assert diff.exit_code == 0
    check = run("apply --check", checkout)
    assert check.exit_code == 1 and "needs the edit" in check.stdout
    assert read(checkout) == CRASHING and git(checkout, "status", "--porcelain") == ""

    applied = run("apply", checkout)
    assert applied.exit_code == 0 and "state: guarded" in applied.stdout
    assert applied.stdout.splitlines()[-1].endswith("or undo with inkling-sconv revert")
    assert git(checkout, "status", "--porcelain") == f" M {NAME}\n"
    assert run("doctor", checkout).exit_code == run("apply --check", checkout).exit_code == 0
    text = read(checkout)
    again = run("apply", checkout)
    assert again.exit_code == 0 and "nothing to do" in again.stdout and read(checkout) == text

    assert run("revert", checkout).exit_code == 0
    assert read(checkout) == CRASHING and git(checkout, "status", "--porcelain") == ""
    assert "nothing to take back" in read_error(run("revert", checkout))
    subprocess.run(["git", "apply", "-"], cwd=checkout, input=diff.stdout_bytes, check=True)
    assert read(checkout) == text


@pytest.mark.parametrize("encoding", ("latin-1", "cp1252", "shift_jis", "utf-8-sig"))
@pytest.mark.parametrize("end", ("\n", "\r\n", ""))
def test_git_takes_the_diff(checkout, encoding, end):
    """In any encoding, and for a method that ends the file without a newline."""
    text = CRASHING.decode()
    if not end:
        (node,) = [
            node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef) and node.name == REFRESH
        ]
        text = "\n".join(text.split("\n")[: node.end_lineno])
    letter = "\u30ab" if encoding == "shift_jis" else "\xe9"
    head = "" if encoding == "utf-8-sig" else f"# -*- coding: {encoding} -*-\n"
    text = f"{head}# {letter}\n{text}".replace(
        "        live = min(", f"        # {letter}\n        live = min("
    )
    commit(checkout, text.replace("\n", end or "\n").encode(encoding), encoding)
    diff = run("apply --diff", checkout)
    assert diff.exit_code == 0
    command = ["git", "apply", "--whitespace=nowarn", "-"]
    subprocess.run(command, cwd=checkout, input=diff.stdout_bytes, check=True)
    assert read(checkout) == add_guard(
        text.replace("\n", end or "\n").encode(encoding), format_as=checkout / NAME
    )


@pytest.mark.parametrize(
    ("code", "reason", "more"),
    (
        ("self.fork_state.shape", "put back: its state after the edit was unknown", "fork_state"),
        (f"count = lambda: {variants.FIELD}", "an inner function reads", "not touched. By hand: "),
    ),
)
def test_apply_leaves_what_it_cannot_heal(share_process, checkout, code, reason, more):
    share_process(releases.CRASHING)
    text = variants.insert(code)(CRASHING.decode()).encode()
    commit(checkout, text, "a fork")
    line = read_error(run("apply", checkout))
    assert reason in line and more in line
    assert read(checkout) == text and git(checkout, "status", "--porcelain") == ""


def unverify(checkout: Path) -> Path:
    """Make the record what a run that was killed during its check leaves; return its place."""
    (place,) = (checkout / ".git/inkling-sconv").iterdir()
    place.write_bytes(place.read_bytes().replace(b'"verified": true', b'"verified": false', 1))
    return place


@pytest.fixture
def answer(monkeypatch, tmp_path) -> Callable[[str], None]:
    """Put a program in the place of the Python that runs the check."""

    def put(body: str) -> None:
        monkeypatch.setattr(sys, "executable", str(attack.write_check(tmp_path / "check", body)))

    return put


@pytest.mark.parametrize(
    ("body", "why"),
    (
        (r"printf 'x\377\n' >&2; exit 1", "unknown (x\ufffd)"),
        (r"printf '\377\n'", "without an answer"),
        ("true", "without an answer"),
        ("echo []", "without an answer"),
        ("echo '{'", "without an answer"),
        ("echo '{\"backends\": 3}'", "without an answer"),
        ("kill -9 $$", "without an error message"),
    ),
)
def test_apply_puts_back_what_was_not_verified(checkout, answer, body, why):
    answer(body)
    line = read_error(run("apply", checkout))
    assert ": put back: its state after the edit was unknown (" in line and why in line
    assert read(checkout) == CRASHING and git(checkout, "status", "--porcelain") == ""
    assert "nothing to take back" in read_error(run("revert", checkout))


@pytest.mark.parametrize("output", (">/dev/full", ">&-", "| true"))
def test_apply_that_cannot_say_what_it_did(checkout, tmp_path, output):
    slow = attack.write_check(tmp_path / "check", f"sleep 0.5; {attack.GUARDED}")
    code = f"import sys; sys.executable = {str(slow)!r}; "
    code += "from inkling_sconv.__main__ import command; command()"
    script = f"""set -o pipefail; "$0" -c "$1" apply "$2" {output}"""
    words = ["bash", "-c", script, sys.executable, code, str(checkout)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "", done.stderr
    (line,) = done.stderr.splitlines()
    assert "put back" in line or "not written" in line or "standard output is closed" in line
    assert read(checkout) == CRASHING and git(checkout, "status", "--porcelain") == ""


def test_an_edit_that_was_never_verified(checkout, answer):
    answer(attack.GUARDED)
    assert run("apply", checkout).exit_code == 0
    edited, place = read(checkout), unverify(checkout)
    for flags, code in (("--check", 1), ("--check --diff", 1), ("--diff", 2)):
        assert "was not verified" in read_error(run(f"apply {flags}", checkout), code)
    # The next apply checks again, and puts back what fails.
    answer(attack.REFUSES)
    assert "put back" in read_error(run("apply", checkout))
    assert read(checkout) == CRASHING and not place.exists()
    answer(attack.GUARDED)
    assert run("apply", checkout).exit_code == 0
    unverify(checkout)
    again = run("apply", checkout)
    assert again.exit_code == 0 and "state: guarded" in again.stdout and read(checkout) == edited
    assert "nothing to do" in run("apply", checkout).stdout
    # Edited since: it is checked, and left whatever comes of it.
    unverify(checkout)
    (checkout / NAME).write_bytes(edited + b"# mine\n")
    answer(attack.REFUSES)
    line = read_error(run("apply", checkout))
    assert "edited after an apply that was not verified, and left so" in line and str(place) in line
    answer(attack.GUARDED)
    assert run("apply", checkout).exit_code == 0
    answer(attack.REFUSES)
    assert "nothing to do" in run("apply", checkout).stdout
    assert read(checkout) == edited + b"# mine\n"
    assert "edited after apply" in read_error(run("revert", checkout))


def test_attack():
    """A short run of ``test/attack.py``, which says what it does."""
    jobs = attack.list_jobs(kills=20, signals=1, real=0, races=1)
    assert attack.attack(jobs, workers=3) == dict.fromkeys(attack.HARMS, 0)


@pytest.mark.parametrize("tree", ("0.5.17",))
def test_apply_inert_fill_outside_git(share_process, tree, tmp_path):
    share_process(tree)
    root = releases.fork(tree, variants.read_text(tree), tmp_path / "tree")
    file = root / releases.BACKEND
    before = sorted(path.name for path in file.parent.iterdir())
    assert "--inert-fill adds them" in read_error(run("apply", root))
    result = run("apply --inert-fill", root)
    assert result.exit_code == 0 and "state: guarded" in result.stdout
    assert run("revert", root).exit_code == 0 and file.read_text() == variants.read_text(tree)
    assert sorted(path.name for path in file.parent.iterdir()) == before


@pytest.mark.parametrize("version", [t for t, s in STATES.items() if s in ("guarded", "exempt")])
def test_a_healthy_release_is_left_alone(version):
    for command in ("apply", "apply --check", "export"):
        result = run(command, releases.release(version))
        assert result.exit_code == 0 and "guard is there" in result.output


# ----------------------------------------------------------------------------------- export


@pytest.mark.parametrize("kind", ("LF", "CR LF", "latin-1"))
def test_export_and_am(checkout, kind, tmp_path):
    text = CRASHING
    git(checkout, "config", "core.autocrlf", "false")
    if kind != "LF":
        text = variants.HEALS[kind](text.decode())
        commit(checkout, text, kind)
    head, index = git(checkout, "rev-parse", "HEAD"), git(checkout, "ls-files", "--stage")
    result = run("export", checkout, "-o", tmp_path / "fix.patch")
    assert result.exit_code == 0 and result.stderr == ""
    assert read(checkout) == text and git(checkout, "rev-parse", "HEAD") == head
    assert git(checkout, "ls-files", "--stage") == index

    following = result.stdout.splitlines()[-1]
    assert following.startswith("next: git am")
    git(checkout, *following.removeprefix("next: git ").split())
    assert read(checkout) == add_guard(text, format_as=checkout / NAME)
    assert git(checkout, "status", "--porcelain", "-uno") == ""
    message = git(checkout, "log", "-1", "--format=%an <%ae>%n%B")
    assert message.startswith("Ada <ada@example.org>\nFix Inkling")
    for word in ("Problem:", "Cause:", "Fix:", "How to test:"):
        assert f"\n{word} " in message


SETTINGS = """
    diff.noprefix=true format.noprefix=true diff.mnemonicPrefix=true format.attach=true
    format.coverLetter=true color.ui=always diff.external=false format.pretty=oneline
    core.autocrlf=true diff.context=0 format.outputDirectory=nowhere commit.gpgSign=true
"""


@pytest.mark.parametrize("setting", SETTINGS.split())
def test_export_with_any_configuration_of_git(checkout, author, setting, tmp_path):
    name, value = setting.split("=")
    git(tmp_path, "config", "--file", str(author), name, value)
    patch = tmp_path / "fix.patch"
    assert run("export", checkout, "-o", patch).exit_code == 0
    git(tmp_path, "config", "--file", str(author), "--unset", name)
    git(checkout, "am", str(patch))
    assert read_shape(read(checkout)) is Shape.GUARDED


def test_export_outside_git_and_of_uncommitted_edits(checkout, tmp_path):
    (checkout / NAME).write_bytes(CRASHING + b"# loose\n")
    result = run("export", checkout)
    assert result.exit_code == 0 and "uncommitted" in result.stderr
    assert b"# loose" not in result.stdout_bytes
    git(checkout, "checkout", "-q", "--", str(NAME))
    root = releases.tree(releases.CRASHING, tmp_path / "tree")
    (tmp_path / "fix.patch").write_bytes(run("export", root).stdout_bytes)
    git(checkout, "am", str(tmp_path / "fix.patch"))
    assert read_shape(read(checkout)) is Shape.GUARDED


def test_branch_and_cherry_pick(checkout):
    git(checkout, "checkout", "-qb", "work")
    commit(checkout, CRASHING + b"\n\n# work\n", "work")
    result = run("export --branch fix --base main", checkout)
    assert result.exit_code == 0
    made, following = result.stdout.splitlines()
    assert made.startswith("branch fix: ") and following.startswith("next: git cherry-pick ")
    assert git(checkout, "branch", "--show-current") == "work\n"
    assert git(checkout, "rev-parse", "fix~1") == git(checkout, "rev-parse", "main")
    assert git(checkout, "diff", "--name-only", "main", "fix") == f"{NAME}\n"
    git(checkout, "cherry-pick", following.split()[3].rstrip(","))
    assert read_shape(read(checkout)) is Shape.GUARDED and read(checkout).endswith(b"# work\n")
    for arguments, word, code in (
        ("--branch fix --base main", "already exists", 2),
        ("--branch b --base nowhere", "nowhere", 2),
        ("--branch a..b", "a..b", 2),
        ("--branch b", "nothing to export", 0),
    ):
        assert word in read_error(run(f"export {arguments}", checkout), code)


def test_a_later_merge_of_upstream_s_edit(checkout):
    upstream = variants.read_text("0.5.18").encode()
    git(checkout, "checkout", "-qb", "upstream")
    commit(checkout, upstream, "#35042")
    git(checkout, "checkout", "-q", "main")
    run("export --branch fix", checkout)
    git(checkout, "merge", "-q", "fix")
    # Both have the same code under another comment, so git asks.
    assert "CONFLICT" in git(checkout, "merge", "upstream", code=1)
    git(checkout, "checkout", "--theirs", "--", str(NAME))
    git(checkout, "add", "-f", str(NAME))
    git(checkout, "commit", "-qm", "merge")
    assert read(checkout) == upstream and "nothing to do" in run("apply", checkout).stdout


def test_a_git_without_an_author_and_no_git(checkout, author, monkeypatch, tmp_path):
    author.write_text("[user]\n useConfigOnly = true\n")
    for arguments in ("export", "export --branch fix"):
        line = read_error(run(arguments, checkout))
        assert "git commit-tree failed" in line and "user.email" in line
    assert git(checkout, "branch", "--list", "fix") == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git is not installed" in read_error(run("export", checkout))


@pytest.mark.parametrize("name", ("libcst", "rich", "typer"))
def test_without_the_extra(tmp_path, name):
    (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('x', name='{name}')\n")
    root = releases.tree(releases.CRASHING, tmp_path / "tree")
    path = f"{tmp_path}{os.pathsep}{releases.ROOT / 'python'}"
    done = run_in_process("doctor", "--static", root, PYTHONPATH=path)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert f"{name} is not installed; pip install 'sglang-inkling-sconv[cli]'" in line
