"""The edit of a fork's own file: every variant is healed, or refused and left as it is."""

from __future__ import annotations

import ast
import difflib
import io
import os
import resource
import subprocess
import sys
import time
import tokenize
from pathlib import Path

import pytest
import releases
import variants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inkling_sconv.codemod import guard, shape
from inkling_sconv.codemod.shape import RefusedError, Shape
from test_releases import CLASS, STATES
from variants import REFRESH, RUFF, VARIANTS, Variant

HEALING = [v for v in VARIANTS if v.heals]
REFUSED = [v for v in VARIANTS if not v.heals]
SOURCES = sorted({v.source for v in VARIANTS})


def fix(variant: Variant, text: bytes, place: Path | None = None) -> bytes:
    inert_fill = variant.source == "0.5.17" and variant.name != "untracked"
    return guard.add_guard(text, inert_fill=inert_fill, format_as=place).text


def decoded(text: bytes) -> str:
    """The text with its line ends, read as Python reads it."""
    return text.decode(encoding(text))


def encoding(text: bytes) -> str:
    return tokenize.detect_encoding(io.BytesIO(text).readline)[0]


def methods(text: bytes, name: str = REFRESH) -> list[ast.FunctionDef]:
    return [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]


def outside(text: bytes, *names: str) -> list[bytes]:
    """The lines that belong to no method of these names."""
    lines = text.splitlines(keepends=True)
    for name in names:
        for node in methods(text, name):
            assert node.end_lineno is not None
            for number in range(node.lineno - 1, node.end_lineno):
                lines[number] = b""
    return [line for line in lines if line]


def changes(before: bytes, after: bytes) -> list[str]:
    old, new = (decoded(text).splitlines() for text in (before, after))
    return [line for line in difflib.ndiff(old, new) if line[0] in "+-"]


def is_expected(line: str, local: str) -> bool:
    """Whether the edit may take this line away, or add it."""
    if line.startswith("-"):
        return "extend_prefix_lens" in line
    words = (local, "prefix_lens", "# A capture batch has no prefix lengths.")
    return any(word in line for word in words)


def test_the_list_is_long_enough():
    assert len(VARIANTS) >= 30 and len(HEALING) >= 20
    assert len({v.name for v in VARIANTS}) == len(VARIANTS)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where a file formatted at a line length lies: beside a configuration that says so."""

    def _place(line_length: int) -> Path:
        folder = tmp_path_factory.mktemp("formatted")
        (folder / "ruff.toml").write_text(f"line-length = {line_length}\n")
        return folder / releases.BACKEND.name

    return _place


@pytest.mark.parametrize("variant", HEALING, ids=lambda v: v.name)
def test_healed(variant, place):
    before = variant.text()
    file = place(variant.line_length) if variant.line_length else None
    after = fix(variant, before, file)
    assert after != before
    assert fix(variant, after, file) == after
    compile(after, variant.name, "exec")
    assert shape.read_shape(after) is Shape.GUARDED

    assert encoding(after) == encoding(before)
    ends = [
        {line[len(line.rstrip(b"\r\n")) :] for line in text.splitlines(keepends=True)}
        for text in (before, after)
    ]
    assert ends[0] == ends[1]
    untracked = variant.source == "0.5.17"
    names = (REFRESH, "_alloc_graph_buffers") if untracked else (REFRESH,)
    assert outside(after, *names) == outside(before, *names)
    if file is not None:
        command = [RUFF, "format", "--check", "--stdin-filename", file.name, "-"]
        subprocess.run(command, input=after, cwd=file.parent, check=True, capture_output=True)
    elif not untracked:
        local = next(
            name for name in ("lens", "prefix_lens") if f"{name} is None" in decoded(after)
        )
        unexpected = [line for line in changes(before, after) if not is_expected(line, local)]
        assert unexpected == []
    if "tab indentation" in variant.name:
        added = [line[2:] for line in changes(before, after) if line[0] == "+"]
        assert added and all(line.startswith("\t\t") and "    " not in line for line in added)


@pytest.mark.parametrize("variant", REFUSED, ids=lambda v: v.name)
def test_refused(variant):
    text = variant.text()
    copy = bytes(bytearray(text))
    with pytest.raises(RefusedError) as caught:
        fix(variant, text)
    assert text == copy
    assert variant.reason in str(caught.value) and "\n" not in str(caught.value)
    words = guard.describe_by_hand(text)
    assert words.startswith("By hand: ") and "mamba_track_seqlens" in words


@pytest.mark.parametrize("tree", SOURCES)
def test_healed_text_behaves(trees, tree, tmp_path):
    names = {}
    for number, variant in enumerate(v for v in HEALING if v.source == tree):
        name = f"v{number:03}.py"
        names[name] = variant.name
        (tmp_path / name).write_bytes(fix(variant, variant.text()))
    if tree == releases.CRASHING:
        for number, (name, guard) in enumerate(variants.GUARDS.items()):
            names[f"g{number}.py"] = f"guard: {name}"
            text = variants.with_local("lens", guard)(releases.backend_text(tree))
            (tmp_path / f"g{number}.py").write_text(text)
        # The control: what a text that needs the edit looks like from here.
        (tmp_path / "control.py").write_text(releases.backend_text(tree))
    seen = trees(tree).play("texts", None, tmp_path)
    if tree == releases.CRASHING:
        assert seen.pop("control.py")[CLASS]["state"] == "crashing"
    assert set(seen) == set(names)
    wrong = {
        names[file]: found
        for file, found in seen.items()
        if {report["state"] for report in found.values()} != {"guarded"}
    }
    assert wrong == {}


@pytest.mark.parametrize("guard", variants.GUARDS)
def test_a_guard_in_another_shape_is_left_alone(guard):
    text = variants.with_local("lens", variants.GUARDS[guard])(
        releases.backend_text(releases.CRASHING)
    ).encode()
    edit = guard.add_guard(text)
    assert edit.shape is Shape.GUARDED and edit.text == text


@pytest.mark.parametrize("name", releases.TREES)
def test_shape(name):
    text = releases.backend_text(name).encode()
    assert shape.read_shape(text).value == STATES[name]
    if STATES[name] in ("guarded", "exempt"):
        assert guard.add_guard(text).text == text
        assert guard.add_guard(text, inert_fill=True).text == text


def test_the_healed_method_is_upstream_s():
    def tree(text: bytes) -> str:
        (method,) = methods(text)
        assert isinstance(method.body[0], ast.Expr)
        return ast.dump(ast.Module(method.body[1:], []))

    healed = guard.add_guard(releases.backend_text(releases.CRASHING).encode()).text
    assert tree(healed) == tree(releases.backend_text("0.5.18").encode())


# Nothing, blank lines, comments at any indentation, and statements that do nothing.
INSERTIONS = st.sampled_from(
    [
        "",
        "\n",
        "   \n",
        "\t\n",
        "# fork\n",
        "        # fork\n",
        "                    # fork\n",
        "        pass\n",
        "        rows = rows  # fork\n",
        "        'fork'\n",
        "        ;\n",
        "  pass\n",
    ]
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_insertions_between_statements(data):
    text = releases.backend_text(releases.CRASHING)
    (method,) = methods(text.encode())
    lines = text.splitlines(keepends=True)
    starts = [node.lineno - 1 for node in method.body]
    for start in reversed(starts):
        lines[start:start] = [data.draw(INSERTIONS)]
    before = "".join(lines).encode()
    try:
        after = guard.add_guard(before).text
    except RefusedError:
        # Refused for a reason: Python does not take it either.
        with pytest.raises(SyntaxError):
            compile(before, "fork", "exec")
        return
    compile(after, "fork", "exec")
    assert shape.read_shape(after) is Shape.GUARDED
    assert guard.add_guard(after).text == after
    assert outside(after, REFRESH) == outside(before, REFRESH)
    assert all(is_expected(line, "prefix_lens") for line in changes(before, after))


def test_fix_takes_under_a_second():
    text = releases.backend_text(releases.CRASHING).encode()
    tries = []
    while len(tries) < 3 and min(tries, default=1) >= 1:
        start = time.process_time()
        guard.add_guard(text)
        tries.append(time.process_time() - start)
    assert min(tries) < 1, tries


@pytest.mark.parametrize(
    ("arguments", "code"),
    (("apply --check", 1), ("export", 0), ("revert", 2), ("doctor --static", 1)),
)
def test_a_command_takes_little_more_than_its_libraries(arguments, code, tmp_path):
    """Less than 3.6 imports of LibCST and Typer: a second where those take 0.28."""
    root = releases.tree(releases.CRASHING, tmp_path / "tree")
    environment = {
        **os.environ,
        "PYTHONPATH": str(releases.ROOT / "python"),
        "GIT_AUTHOR_NAME": "A",
        "GIT_AUTHOR_EMAIL": "a@example.org",
        "GIT_COMMITTER_NAME": "A",
        "GIT_COMMITTER_EMAIL": "a@example.org",
    }

    def seconds(python: str, *arguments: str, code: int = 0) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-c", python, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == code, done.stderr
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    ours = "from inkling_sconv.__main__ import command; command()"
    tries: list[float] = []
    while len(tries) < 5 and min(tries, default=3.6) >= 3.6:
        libraries = seconds("import libcst, typer")
        tries.append(seconds(ours, *arguments.split(), str(root), code=code) / libraries)
    assert min(tries) < 3.6, tries
