"""The pages: links lead somewhere, names exist, and quoted lines are what the code prints."""

import ast
import functools
import re
from pathlib import Path

import pytest
import releases
import typer.main
from inkling_sconv import __version__, cli, names
from test_forks import crashing_text

ROOT = releases.ROOT
PACKAGE = ROOT / "python/inkling_sconv"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
TROUBLE = ROOT / "docs/troubleshooting.md"
# Files of a reader's checkout of SGLang.
IN_FORKS = {
    "python/sglang/srt/layers/attention/linear/inkling_sconv_backend.py",
    ".github/workflows/inkling-sconv.yml",
    "test/run_suite.py",
}


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def list_code(text: str) -> list[str]:
    """The lines of fenced blocks, and the inline code, of a page."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`]+)`", without_blocks(text))
    return [line for block in fenced for line in block.splitlines()] + [
        " ".join(found.split()) for found in inline
    ]


def list_anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("name", NAMES)
def test_links(name):
    page = ROOT / name
    text = without_blocks(page.read_text())
    defined = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", text, re.MULTILINE))
    used = set(re.findall(r"(?<!\])\[(#\d+)\](?![:(])", text))
    assert used <= defined.keys(), f"{name}: no link for {used - defined.keys()}"
    for link in (*re.findall(r"\]\(([^)\s]+)\)", text), *defined.values()):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT) and target.exists(), f"{name}: {link}"
        assert not anchor or anchor in list_anchors(target), f"{name}: {link}"


def test_the_readme_links_issues_and_pages():
    text = without_blocks((ROOT / "README.md").read_text())
    assert not re.findall(r"(?<![\[\w/])#\d{5}", text)
    assert [name for name in NAMES if name != "README.md" and f"]({name})" not in text] == []


def test_a_row_of_the_readme_is_one_line():
    rows = re.findall(r"^\|.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [row for row in rows if len(row) > 120] == []


def test_the_architecture_names_every_file():
    text = (ROOT / "docs/architecture.md").read_text()
    files = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    # One line of the page names all of these folders' files.
    paths = {str(f) for f in files if f.stem != "__init__" and f.parts[0] not in ("cli", "fork_ci")}
    paths |= {f"{file.parent}/" for file in files if file.parent != Path()}
    assert sorted(path for path in paths if f"`{path}`" not in text) == []
    named = re.findall(r"^\| \*{0,2}`([\w/.]+)`", text, re.MULTILINE)
    assert [
        path for path in named if not ((ROOT / path).exists() or (PACKAGE / path).exists())
    ] == []


def test_make_targets():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    lines = [line for page in PAGES for line in list_code(page.read_text())]
    named = {name for line in lines for name in re.findall(r"(?:^|&& )make ([a-z][a-z-]*)", line)}
    assert {"demo", "test", "lint", "evidence", "designs"} <= named
    assert named - targets == set()


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_their_options(name):
    commands = typer.main.get_command(cli.app).commands
    for line in list_code((ROOT / name).read_text()):
        line = line.partition(" #")[0]
        for command, rest in re.findall(r"(?<![\w-])inkling-sconv ([a-z][a-z-]*)([^;|]*)", line):
            assert command in commands, f"{name}: {line}"
            options = {option for p in commands[command].params for option in p.opts}
            assert set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", rest)) <= options, f"{name}: {line}"


@pytest.mark.parametrize("name", NAMES)
def test_files_and_variables_exist(name):
    text = (ROOT / name).read_text()
    variables = set(re.findall(r"\bINKLING_SCONV[A-Z_]*\b", text))
    ours = {value for key, value in vars(names).items() if key.endswith("_VARIABLE")}
    source = "".join(path.read_text() for path in (ROOT / "test").rglob("*.py"))
    source += (PACKAGE / "fork_ci/inkling-sconv.yml").read_text()
    assert [v for v in variables - ours if v not in source] == []
    if name != "CHANGELOG.md":
        tops = r"(?:test|benchmark|docs|python|\.github)/[\w/.-]+\.(?:py|md|yml)"
        paths = {
            path for line in list_code(text) for path in re.findall(rf"(?<![\w/]){tops}", line)
        }
        assert [path for path in paths - IN_FORKS if not (ROOT / path).exists()] == []


# ------------------------------------------------------------------- what troubleshooting quotes


@functools.cache
def list_templates() -> list[tuple[str | None, ...]]:
    """Every string of the package; None is where a value goes in."""
    found: set[tuple[str | None, ...]] = set()
    for path in PACKAGE.rglob("*.py"):
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
def is_printable(text: str) -> bool:
    """Whether some string of the code gives ``text``, and others what is put into it."""
    return any(fits(parts, text) for parts in list_templates())


def fits(parts: tuple[str | None, ...], text: str) -> bool:
    if not parts:
        return text == ""
    head, *tail = parts
    rest = tuple(tail)
    if head is not None:
        return text.startswith(head) and fits(rest, text[len(head) :])
    if not all(part in text for part in rest if part):
        return False
    return any(fits(rest, text[end:]) and is_value(text[:end]) for end in range(len(text), -1, -1))


def is_value(text: str) -> bool:
    """A word or a list of them, an exception or numbers as Python prints them, or again one of the
    code's strings."""
    plain = r"\S*|[\w-]+(?:, [\w-]+)*|\w+Error: .*|No module named '\w+'|[\[(]\d+(?:, \d+)*[\])]"
    return bool(re.fullmatch(plain, text)) or is_printable(text)


def list_quoted() -> list[str]:
    blocks = re.findall(r"^```log\n(.*?)^```", TROUBLE.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_every_quoted_line_is_one_that_the_code_prints():
    lines = list_quoted()
    assert len(lines) > 30
    assert [line for line in lines if not is_printable(line)] == []
    for line in lines:
        words = line.split()
        # One word more, before the last: no template has it, and no value holds a space.
        assert not is_printable(" ".join([*words[:-1], "surely", words[-1]])) or "Error: " in line


# Scenario, and what the environment and the fork are.
SCENES: dict[str, list[tuple[str, dict[str, str | None]]]] = {
    "crashing": [
        ("late", {}),
        ("late", {"mode": "off"}),
        ("late", {"mode": "banana"}),
        ("late", {"INKLING_SCONV_DRAFT_EXTEND": "banana"}),
        ("hooked", {}),
        ("late", {"text": "extra"}),
        ("late", {"text": "nothing"}),
        ("early", {"mode": "force", "text": "buffers"}),
    ],
    "0.5.17": [
        ("late", {}),
        ("late", {"mode": "force"}),
        ("fixes", {"INKLING_SCONV_FIXES": ""}),
        ("fixes", {"INKLING_SCONV_FIXES": "draft-state"}),
        ("fixes", {"INKLING_SCONV_FIXES": "draft-state,banana"}),
        ("fixes", {"INKLING_SCONV_FIXES": "banana"}),
        ("fixes-fail", {"INKLING_SCONV_FIXES": ""}),
    ],
    "0.5.18": [
        ("late", {}),
        ("late", {"mode": "fast"}),
        ("fixes", {"INKLING_SCONV_FIXES": "draft-checkpoint"}),
        ("fixes", {"INKLING_SCONV_FIXES": "draft-extend,draft-checkpoint,draft-window"}),
        ("fixes", {"INKLING_SCONV_FIXES": ","}),
    ],
    "0.5.22": [
        ("late", {}),
        ("late", {"mode": "force"}),
        ("late", {"mode": "fast", "INKLING_SCONV_DRAFT_EXTEND": "inert"}),
    ],
}


def make_text(name: str) -> str:
    if name == "nothing":
        return "x = 1\n"
    if name == "buffers":
        return crashing_text(("_graph_track_conv_indices", "_fork_rows"))
    end = "        self.sconv_metadata.track_conv_indices = out"
    return crashing_text((end, f"{end}\n        forward_batch.mamba_extra = out.sum()"))


@pytest.mark.parametrize("tree", SCENES)
def test_what_the_plugin_logs_is_on_the_page(drive, tree):
    lines = list_quoted()
    for scenario, options in SCENES[tree]:
        options = {"INKLING_SCONV_FIXES": "none", **options}
        text = options.pop("text", None)
        log = drive(tree, scenario, text=text and make_text(text), **options)["log"]
        assert log
        assert [line for line in log if line.partition(" ")[2] not in lines] == [], options


def test_the_line_in_the_readme(drive):
    line = drive(releases.CRASHING, "late")["log"][0].partition(" ")[2]
    assert line in " ".join((ROOT / "README.md").read_text().split())
    assert __version__ in line
