"""The edit of a fork's own file: each variant is healed, or refused and left as it is."""

import ast
import difflib
import io
import os
import subprocess
import sys
import time
import tokenize

import pytest
import releases
import variants
from inkling_sconv.codemod import guard
from inkling_sconv.codemod.guard import add_guard, describe_by_hand
from inkling_sconv.codemod.shape import RefusedError, Shape, read_shape
from inkling_sconv.codemod.unguard import remove_guard
from inkling_sconv.names import REFRESH
from test_releases import STATES
from variants import GUARDS, HEALING, REFUSING, RUFF, UNTRACKED

CRASHING = variants.read_text(releases.CRASHING)


def find_encoding(text: bytes) -> str:
    return tokenize.detect_encoding(io.BytesIO(text).readline)[0]


def find_methods(text: bytes, *names: str) -> list[ast.FunctionDef]:
    nodes = ast.walk(ast.parse(text))
    return [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name in names]


def cut_methods(text: bytes, *names: str) -> list[bytes]:
    """Return the lines that belong to no method of these names."""
    lines = text.splitlines(keepends=True)
    for node in find_methods(text, *names):
        lines[node.lineno - 1 : node.end_lineno] = [b""] * (node.end_lineno - node.lineno + 1)
    return [line for line in lines if line]


def check_edit(before: bytes, after: bytes, *methods: str, local: str = "") -> None:
    """Check that the edit heals, once, inside ``methods`` only, and only in lines of ``local``."""
    assert after != before and read_shape(after) is Shape.GUARDED
    compile(after, "fork", "exec")
    assert cut_methods(after, *methods) == cut_methods(before, *methods)
    encoding = find_encoding(before)
    assert find_encoding(after) == encoding
    old, new = (text.decode(encoding).splitlines(keepends=True) for text in (before, after))
    assert {line[len(line.rstrip("\r\n")) :] for line in old} == {
        line[len(line.rstrip("\r\n")) :] for line in new
    }
    expected = (local, "prefix_lens", "# A capture batch has no prefix lengths")
    for line in difflib.ndiff(old, new) if local else ():
        assert line[0] != "-" or "extend_prefix_lens" in line
        assert line[0] != "+" or any(word in line for word in expected)


@pytest.mark.parametrize("variant", HEALING, ids=lambda v: v.name)
def test_heals(variant, tmp_path):
    before, place = variant.make_text(), None
    untracked = variant.source == UNTRACKED
    if variant.line_length:
        place = tmp_path / releases.BACKEND.name
        (tmp_path / "ruff.toml").write_text(f"line-length = {variant.line_length}\n")
    after = add_guard(before, inert_fill=untracked, format_as=place)
    assert add_guard(after, inert_fill=untracked, format_as=place) == after
    methods = (REFRESH, "_alloc_graph_buffers") if untracked else (REFRESH,)
    local = "lens" if b"        if lens is None" in after else "prefix_lens"
    check_edit(before, after, *methods, local="" if place or untracked else local)
    if place is not None:
        command = [RUFF, "format", "--check", "--stdin-filename", place.name, "-"]
        subprocess.run(command, input=after, cwd=tmp_path, check=True, capture_output=True)
    if "tab indentation" in variant.name:
        added = {*after.splitlines()} - {*before.splitlines()}
        assert added and all(line.startswith(b"\t\t") and b"    " not in line for line in added)


@pytest.mark.parametrize("variant", REFUSING, ids=lambda v: v.name)
def test_refuses(variant):
    text = variant.make_text()
    with pytest.raises(RefusedError) as caught:
        add_guard(text, inert_fill=variant.source == UNTRACKED)
    assert variant.reason in str(caught.value) and "\n" not in str(caught.value)
    words = describe_by_hand(text)
    assert words.startswith("By hand: ") and "mamba_track_seqlens" in words


@pytest.mark.parametrize("tree", (releases.CRASHING, UNTRACKED))
def test_healed_text_behaves(trees, tree, tmp_path):
    texts = {
        variant.name: add_guard(variant.make_text(), inert_fill=tree == UNTRACKED)
        for variant in HEALING
        if variant.source == tree
    }
    if tree == releases.CRASHING:
        texts |= {name: bind_guard(name) for name in GUARDS}
        texts["control"] = CRASHING.encode()
    files = {f"v{number:03}.py": name for number, name in enumerate(texts)}
    for file, name in files.items():
        (tmp_path / file).write_bytes(texts[name])
    seen = trees(tree).play("texts", None, tmp_path)
    assert set(seen) == set(files)
    states = {files[file]: {r["state"] for r in found.values()} for file, found in seen.items()}
    assert states.pop("control", {"crashing"}) == {"crashing"}
    assert {name: state for name, state in states.items() if state != {"guarded"}} == {}


def bind_guard(name: str) -> bytes:
    return variants.bind("lens", GUARDS[name])(CRASHING).encode()


@pytest.mark.parametrize("source", [*releases.TREES, *GUARDS])
def test_shape(source):
    text = bind_guard(source) if source in GUARDS else variants.read_text(source).encode()
    state = STATES.get(source, "guarded")
    assert read_shape(text).value == state
    if state in ("guarded", "exempt"):
        assert add_guard(text) == add_guard(text, inert_fill=True) == text
    if state == "untracked":
        with pytest.raises(RefusedError, match="--inert-fill adds them"):
            add_guard(text)


def test_the_healed_method_is_upstream_s():
    def dump(text: str | bytes) -> str:
        (method,) = find_methods(text, REFRESH)
        return ast.dump(ast.Module(method.body[1:], []))

    healed = add_guard(CRASHING.encode())
    assert dump(healed) == dump(variants.read_text("0.5.18"))
    # And the other way round.
    assert dump(remove_guard(healed)) == dump(CRASHING)
    with pytest.raises(RefusedError, match="found 0"):
        remove_guard(CRASHING.encode())
    with pytest.raises(RefusedError, match="not an `if`"):
        remove_guard(bind_guard("an expression"))


@pytest.mark.parametrize("deep", ("f({})", "[{}]", "a[{}]", "-{}", "(1 if 2 else {})", "f(*{})"))
def test_deep_nesting_is_healed_or_refused(deep):
    """Up to the limit, in the method and outside."""
    for levels in (60, 90, 190, 199, 300):
        inner = "0"
        for _ in range(levels):
            inner = deep.format(inner)
        for text in (
            CRASHING.replace("        live = min(", f"        x = {inner}\n        live = min("),
            f"{CRASHING}\nx = {inner}\n",
        ):
            try:
                assert read_shape(add_guard(text.encode())) is Shape.GUARDED
            except RefusedError as error:
                assert levels > 90 and ("nested deeper" in str(error) or "not Python" in str(error))
            assert describe_by_hand(text.encode()).startswith("By hand: ")


def test_a_formatter_that_does_not_end(tmp_path, monkeypatch):
    (tmp_path / "ruff").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "ruff").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(guard, "RUFF_SECONDS", 0.2)
    start = time.monotonic()
    after = add_guard(CRASHING.encode(), format_as=tmp_path / "backend.py")
    assert after == add_guard(CRASHING.encode()) and time.monotonic() - start < 30


def test_a_command_takes_little_more_than_its_libraries(tmp_path):
    """Less than 3.6 imports of LibCST and Typer: a second where those take 0.28."""
    root = releases.tree(releases.CRASHING, tmp_path / "tree")
    environment = {**os.environ, "PYTHONPATH": str(releases.ROOT / "python")}
    for who in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{who}_NAME": "A", f"GIT_{who}_EMAIL": "a@example.org"}

    def measure(python: str, *arguments: str, code: int = 0) -> float:
        before = sum(os.times()[2:4])
        command = [sys.executable, "-c", python, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True)
        assert done.returncode == code, done.stderr
        return sum(os.times()[2:4]) - before

    ours = "from inkling_sconv.__main__ import command; command()"
    commands = {"apply --check": 1, "export": 0, "revert": 2, "doctor --static": 1}
    for arguments, code in commands.items():
        tries: list[float] = []
        while len(tries) < 5 and min(tries, default=3.6) >= 3.6:
            libraries = measure("import libcst, typer")
            tries.append(measure(ours, *arguments.split(), str(root), code=code) / libraries)
        assert min(tries) < 3.6, (arguments, tries)
    assert min(measure(ours, "--help") for _ in range(3)) < 1
