"""The pages: links lead somewhere, commands exist, and quoted lines are what the code prints."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
import releases
import typer.main
from inkling_sconv import __version__, cli
from test_forks import crashing_text

ROOT = releases.ROOT
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
TROUBLE = ROOT / "docs/troubleshooting.md"


def code(text: str) -> list[str]:
    """The lines of fenced blocks, and the inline code, of a page."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    inline = [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", prose)]
    return [*(line for block in fenced for line in block.splitlines()), *inline]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings}


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


@pytest.mark.parametrize("name", NAMES)
def test_links(name):
    page = ROOT / name
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT) and target.exists(), f"{name}: {link}"
        assert not anchor or anchor in anchors(target), f"{name}: {link}"


def test_every_page_is_linked_from_the_readme():
    text = (ROOT / "README.md").read_text()
    assert [name for name in NAMES if name != "README.md" and f"]({name})" not in text] == []


def test_make_targets():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    named = {
        target
        for page in PAGES
        for line in code(page.read_text())
        for target in re.findall(r"(?:^|&& )make ([a-z][a-z-]*)", line)
    }
    assert {"demo", "test", "lint", "evidence", "designs"} <= named
    assert named - targets == set()


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_their_options(name):
    commands = typer.main.get_command(cli.app).commands
    for line in code((ROOT / name).read_text()):
        line = line.partition(" #")[0]
        for command, rest in re.findall(r"(?<![\w-])inkling-sconv ([a-z][a-z-]*)([^;|]*)", line):
            assert command in commands, f"{name}: {line}"
            options = {option for p in commands[command].params for option in p.opts}
            assert set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", rest)) <= options, f"{name}: {line}"


# ------------------------------------------------------------------- what troubleshooting quotes


@functools.cache
def templates() -> list[tuple[str | None, ...]]:
    """Every string of the package; None is where a value goes in."""
    found: set[tuple[str | None, ...]] = set()
    for path in (ROOT / "python/inkling_sconv").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                values = node.values
                parts = [v.value if isinstance(v, ast.Constant) else None for v in values]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                pieces = re.split(r"%s", node.value)
                parts = [part for piece in pieces for part in (piece, None)][:-1]
            else:
                continue
            literal = "".join(part for part in parts if part)
            # What has next to nothing of its own would match everything.
            if len(literal.replace(" ", "")) >= 2:
                found.add(tuple(part for part in parts if part != ""))
    return list(found)


@functools.cache
def printable(text: str) -> bool:
    """Whether some string of the code gives ``text``, and others what is put into it."""
    return any(fits(parts, text) for parts in templates())


def fits(parts: tuple[str | None, ...], text: str) -> bool:
    if not parts:
        return text == ""
    head, *tail = parts
    rest = tuple(tail)
    if head is not None:
        return text.startswith(head) and fits(rest, text[len(head) :])
    if not all(part in text for part in rest if part):
        return False
    return any(fits(rest, text[end:]) and value(text[:end]) for end in range(len(text), -1, -1))


def value(text: str) -> bool:
    """A word or a list of them, an exception or numbers as Python prints them, or again one of the
    code's strings."""
    plain = r"\S*|[\w-]+(?:, [\w-]+)*|\w+Error: .*|No module named '\w+'|[\[(]\d+(?:, \d+)*[\])]"
    return bool(re.fullmatch(plain, text)) or printable(text)


def quoted() -> list[str]:
    blocks = re.findall(r"^```log\n(.*?)^```", TROUBLE.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("line", quoted())
def test_a_quoted_line_is_one_that_the_code_prints(line):
    assert printable(line)


def test_other_lines_are_not_taken_for_ours():
    assert len(quoted()) > 30
    for line in quoted():
        words = line.split()
        # A word more, in front of the last one: no template has it, and no value holds a space.
        assert not printable(" ".join([*words[:-1], "surely", words[-1]])) or "Error: " in line


# Scenario, mode, text of a fork, and the form of draft-extend.
SCENES: dict[str, list[tuple[str, str | None, str | None, str]]] = {
    "crashing": [
        ("late", None, None, ""),
        ("late", "off", None, ""),
        ("late", "banana", None, ""),
        ("late", None, None, "banana"),
        ("hooked", None, None, ""),
        ("late", None, "extra", ""),
        ("late", None, "nothing", ""),
        ("early", "force", "buffers", ""),
    ],
    "0.5.17": [("late", None, None, ""), ("late", "force", None, "")],
    "0.5.18": [
        ("late", None, None, ""),
        ("late", "fast", None, ""),
    ],
    "0.5.22": [
        ("late", None, None, ""),
        ("late", "force", None, ""),
        ("late", "fast", None, "inert"),
    ],
}


FIX_SCENES = {
    "0.5.17": [
        ("mended", ""),
        ("mended", "draft-state"),
        ("mended", "banana"),
        ("undrivable", ""),
    ],
    "0.5.18": [("mended", "draft-checkpoint")],
}


def scene_text(name: str) -> str:
    if name == "nothing":
        return "x = 1\n"
    if name == "buffers":
        return crashing_text(("_graph_track_conv_indices", "_fork_rows"))
    end = "        self.sconv_metadata.track_conv_indices = out"
    return crashing_text((end, f"{end}\n        forward_batch.mamba_extra = out.sum()"))


@pytest.mark.parametrize("tree", SCENES)
def test_what_the_plugin_logs_is_on_the_page(drive, tree):
    lines = quoted()
    for scenario, mode, text, form in SCENES[tree]:
        variables = {"INKLING_SCONV_FIXES": "none", "INKLING_SCONV_DRAFT_EXTEND": form}
        seen = drive(tree, scenario, mode, text and scene_text(text), **variables)["log"]
        assert seen
        for line in seen:
            said = line.partition(" ")[2].replace(__version__, "0.1.0")
            assert said in lines, (tree, scenario, mode, text, form)


@pytest.mark.parametrize("tree", FIX_SCENES)
def test_what_the_fixes_log_is_on_the_page(drive, tree):
    lines = quoted()
    for scenario, names in FIX_SCENES[tree]:
        seen = drive(tree, scenario, INKLING_SCONV_FIXES=names)["log"]
        assert len(seen) > 1
        for line in seen:
            said = line.partition(" ")[2].replace(__version__, "0.1.0")
            assert said in lines, (tree, scenario, names)


def test_the_line_in_the_readme(drive):
    line = drive(releases.CRASHING, "late")["log"][0]
    said = line.partition(" ")[2].replace(__version__, "0.1.0")
    assert said in " ".join((ROOT / "README.md").read_text().split())
