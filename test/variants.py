"""Forks of the backend's file, each made at test time by a small edit of a release's own text.

No line of SGLang is kept here: an edit names only the few tokens that it changes.
"""

import ast
import functools
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import releases
from inkling_sconv.names import REFRESH, STATIC_INDICES

Edit = Callable[[str], str | bytes]

CLASS = "InklingShortConvAttnBackend"
FIELD = "forward_batch.extend_prefix_lens"
ZEROS = "torch.zeros_like(forward_batch.mamba_track_seqlens)"
LIVE = "        live = min("
MASK_TEST = "if forward_batch.mamba_track_mask is None:"
RUFF = shutil.which("ruff", path=str(Path(sys.executable).parent)) or "ruff"
read_text = functools.cache(releases.backend_text)


@dataclass(frozen=True)
class Variant:
    """An edit of ``source`` that heals, or that is refused with ``reason``.

    ``line_length`` is the one that the text is formatted at; None if it is not.
    """

    name: str
    edit: Edit
    reason: str = ""
    source: str = releases.CRASHING
    line_length: int | None = None

    def make_text(self) -> bytes:
        text = self.edit(read_text(self.source))
        return text if isinstance(text, bytes) else text.encode()


# ------------------------------------------------------------------------------------- edits


def replace(text: str, *edits: tuple[str, str]) -> str:
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return text


def split(text: str) -> tuple[str, str, str]:
    """Split into what is before the method, the method, and what comes after it."""
    start = text.index(f"    def {REFRESH}")
    end = text.index("\n    def ", start) + 1
    return text[:start], text[start:end], text[end:]


def edit_method(edit: Callable[[str], str]) -> Edit:
    def edit_text(text: str) -> str:
        head, method, tail = split(text)
        return head + edit(method) + tail

    return edit_text


def in_method(*edits: tuple[str, str]) -> Edit:
    return edit_method(lambda method: replace(method, *edits))


def chain(*edits: Edit) -> Edit:
    return lambda text: functools.reduce(lambda result, edit: edit(result), edits, text)


def indent(code: str) -> str:
    return textwrap.indent(textwrap.dedent(code).strip("\n") + "\n", " " * 8)


def insert(code: str, before: str = LIVE) -> Edit:
    """Insert ``code`` before the first read of the prefix lengths."""
    return in_method((before, indent(code) + before))


def bind(name: str, code: str, used: bool = True) -> Edit:
    """Insert ``code``, which binds the local ``name``; ``used`` in the place of the field."""
    return chain(in_method((FIELD, name)) if used else str, insert(code))


def replace_one(pattern: str, new: str) -> Edit:
    """Replace the one place in the method that ``pattern`` matches."""

    def edit(method: str) -> str:
        result, count = re.subn(pattern, lambda _: new, method, flags=re.DOTALL | re.MULTILINE)
        assert count == 1, pattern
        return result

    return edit_method(edit)


def set_signature(parameters: str) -> Edit:
    return replace_one(rf"def {REFRESH}\(.*?\):\n", f"def {REFRESH}({parameters}:\n")


def rename(*pairs: tuple[str, str]) -> Edit:
    def edit(method: str) -> str:
        for old, new in pairs:
            method, count = re.subn(rf"(?<![\w.]){old}\b", new, method)
            assert count, old
        return method

    return edit_method(edit)


def nest(opening: str) -> Edit:
    """Put everything from the first read on into a block of its own."""

    def edit(method: str) -> str:
        place = method.index(LIVE)
        return f"{method[:place]}        {opening}\n{textwrap.indent(method[place:], '    ')}"

    return edit_method(edit)


def guard_in_fill(test: str) -> Edit:
    """Put the guard inside the inert fill's branch, which a second call skips."""
    fill_end = "        rows = forward_batch.batch_size\n        query"
    guard = f"            if {test}:\n                lens = {ZEROS}\n"
    return chain(
        in_method((FIELD, "lens"), (fill_end, guard + fill_end)),
        insert(f"lens = {FIELD}", before=f"        {MASK_TEST}"),
    )


def return_early(code: str) -> Edit:
    """Replace the untracked tree's early return."""
    return replace_one(rf"^ {{8}}{re.escape(MASK_TEST)}\n {{12}}return\n", indent(code))


def format_at(line_length: int) -> Edit:
    def edit(text: str) -> bytes:
        command = [RUFF, "format", "--isolated", f"--line-length={line_length}", "-"]
        return subprocess.run(command, input=text.encode(), check=True, capture_output=True).stdout

    return edit


def set_newlines(*ends: str) -> Edit:
    return lambda text: "".join(
        line + ends[number % len(ends)] for number, line in enumerate(text.splitlines())
    ).encode()


def encode_latin_1(text: str) -> bytes:
    return ("# -*- coding: latin-1 -*-\n# Café, naïve, ½\n" + text).encode("latin-1")


def append(code: str) -> Edit:
    return lambda text: text + code


def indent_class(text: str) -> str:
    start = text.index(f"class {CLASS}(")
    end = text.index("\nclass ", start)
    return text[:start] + "if True:\n" + textwrap.indent(text[start:end], "    ") + text[end:]


def put_between(code: str) -> Edit:
    """Put ``code`` before each statement of the method."""

    def edit(text: str) -> str:
        lines = text.splitlines(keepends=True)
        nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
        (method,) = [node for node in nodes if node.name == REFRESH]
        for statement in reversed(method.body):
            lines.insert(statement.lineno - 1, code)
        return "".join(lines)

    return edit


INDENT = " " * 8
BETWEEN = (
    *("\n", "# fork\n", f"{INDENT}# fork\n", f"{INDENT * 2}# fork\n"),
    *(f"{INDENT}pass\n", f"{INDENT}fork = 0  # fork\n", f"{INDENT}'fork'\n"),
)
ADD_SUBCLASS = f"\n\nclass Fork({CLASS}):\n"
CALL_BASE = f"    def {REFRESH}(self, batch, graph):\n        super().{REFRESH}(batch, graph)\n"
CALL = f"self.{REFRESH}(forward_batch, on_graph_path"
CONFLICT = "<<<<<<< ours\nx = 1\n=======\nx = 2\n>>>>>>> theirs"
SECOND_IF = (
    (f"        {MASK_TEST}\n            if not", f"        {MASK_TEST[:-1]} and not"),
    ("            return\n", f"            return\n        {MASK_TEST}\n"),
)

# ------------------------------------------------------------------------------------ tables

HEALS: dict[str, Edit] = {
    **{f"{code!r} between statements": put_between(code) for code in BETWEEN},
    # How the text is written.
    "CR LF": set_newlines("\r\n"),
    "mixed newlines": set_newlines("\n", "\r\n", "\r\n"),
    "tab indentation": lambda t: re.sub(r"(?m)^(?: {4})+", lambda m: "\t" * (len(m[0]) // 4), t),
    "trailing blanks": edit_method(lambda m: re.sub(r"(?m)(?<=[\w)\],:])$", "  \t", m)),
    "byte order mark": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "latin-1": encode_latin_1,
    "no final newline": lambda text: text.rstrip("\n"),
    "form feed": lambda text: replace(text, ("\nclass ", "\n\f\nclass ")),
    "slices over lines": in_method(("[:live]", "[\n            :live\n            ]")),
    # What things are called.
    "renamed arguments": rename(
        ("forward_batch", "fb"), ("on_graph_path", "recorded"), ("self", "this")
    ),
    "the local's name is taken": insert("prefix_lens = 0"),
    "torch as th": lambda text: re.sub(
        r"(?<!import )\btorch\.", "th.", replace(text, ("import torch\n", "import torch as th\n"))
    ),
    "class renamed": lambda text: text.replace(CLASS, "ForkSconvBackend"),
    # What the method takes, and where it stands.
    "keyword-only": chain(
        set_signature("self, forward_batch, *, on_graph_path)"),
        lambda text: replace(text, (CALL, CALL.replace(", on", ", on_graph_path=on"))),
    ),
    "positional-only": set_signature("self, forward_batch, on_graph_path, /)"),
    "defaults": set_signature("self, forward_batch, on_graph_path=False, layer=None)"),
    "annotations": set_signature(
        "self: object, forward_batch: 'ForwardBatch', on_graph_path: 'bool') -> 'None'"
    ),
    "decorated": in_method((f"    def {REFRESH}", f"    @torch.no_grad()\n    def {REFRESH}")),
    "override that calls its base": append(ADD_SUBCLASS + CALL_BASE),
    "two definitions": lambda text: text + ADD_SUBCLASS + split(text)[1],
    "class under an if": indent_class,
    # What else the method does.
    "asks for draft-extend": insert(
        "if forward_batch.forward_mode.is_draft_extend_v2():\n    kind = 'draft'"
    ),
    "None on the left": in_method((MASK_TEST, "if None is forward_batch.mamba_track_mask:")),
    "two ifs instead of one in the other": in_method(*SECOND_IF),
    "in a with": nest("with torch.no_grad():"),
    "in an if": nest("if rows >= 0:"),
    "in a try": chain(
        nest("try:"),
        edit_method(lambda m: m.rstrip("\n") + "\n        finally:\n            pass\n\n"),
    ),
    "inner function that reads something else": insert("def inner():\n    return rows"),
    # Where the field is read, or bound already.
    "read in a condition": insert(f"if {FIELD}.shape[0] < 0:\n    rows = rows"),
    "read in a loop": insert(f"for _ in range(1):\n    {FIELD}.shape"),
    "several statements on a line": insert(f"one = 1; two = {FIELD}.shape[0]; del_ = 3"),
    "bound and used": bind("prefix_lens", f"prefix_lens = {FIELD}"),
    "bound": bind("prefix_lens", f"prefix_lens = {FIELD}", used=False),
    "bound under another name": bind("lens", f"lens = {FIELD}"),
    "annotated binding": bind("lens", f"lens: torch.Tensor = {FIELD}"),
    "two names at once": bind("lens", f"lens = other = {FIELD}\nrows += 0 * len(other)"),
    "bound in a tuple": bind("lens", f"lens, rows = {FIELD}, rows"),
    "bound by a walrus": bind("lens", f"int((lens := {FIELD}).shape[0])"),
    "bound in a block": bind("lens", f"if rows >= 0:\n    lens = {FIELD}"),
}

REFUSED: dict[str, tuple[str, Edit]] = {
    # No Python that can be read, or none of ours.
    "CR": ("CR-only", set_newlines("\r")),
    "merge conflict": ("not Python", insert(CONFLICT)),
    "syntax error": ("not Python", append("\ndef broken(:\n")),
    "not UTF-8": ("cannot be read", lambda text: text.encode() + b"# caf\xe9\n"),
    "unknown encoding": ("not Python", lambda text: "# coding: klingon\n" + text),
    "NUL bytes": ("not Python", append("\0")),
    "empty": ("no class here", lambda text: ""),
    "too deep": ("nested deeper", append("\nTOTAL = " + "+".join(["1"] * 20_000) + "\n")),
    "too deep in the method": ("nested deeper", insert("total = " + "+".join(["1"] * 1500))),
    "method of another name": ("no class here", lambda text: text.replace(REFRESH, "_windows")),
    "one line": (
        "on one line",
        edit_method(
            lambda _: (
                f"    def {REFRESH}(self, b, g): b.mamba_track_mask = 0; b.extend_prefix_lens\n\n"
            )
        ),
    ),
    "too few arguments": ("expected a third", set_signature("self, forward_batch)")),
    "no torch": (
        "does not import torch",
        lambda text: replace(text, ("import torch\n", "torch = __import__('torch')\n")),
    ),
    # Another guard: the first three are rejected designs.
    "guard on None alone": (
        "handled already",
        bind("lens", f"lens = {FIELD}\nif lens is None:\n    lens = {ZEROS}"),
    ),
    "guard in the fill": ("handled already", guard_in_fill("lens is None")),
    "whole guard in the fill": (
        "handled already",
        guard_in_fill("lens is None and on_graph_path"),
    ),
    "raises instead": (
        "handled already",
        bind("lens", f"lens = {FIELD}\nif lens is None and on_graph_path:\n    raise ValueError"),
    ),
    # Names that would mean something else.
    "written into the batch": ("is assigned", insert(f"{FIELD} = {FIELD}.to(torch.int64)")),
    "another name": ("read indirectly", insert("fb = forward_batch\nfb.extend_prefix_lens.shape")),
    "getattr": ("read indirectly", insert("getattr(forward_batch, 'extend_prefix_lens').shape")),
    "used on its line": ("on its line", bind("lens", f"lens = {FIELD}; count = lens.shape[0]")),
    "inner function": ("an inner function", insert(f"count = lambda: {FIELD}.shape[0]")),
    "batch bound anew": ("is reassigned", insert("forward_batch = forward_batch")),
    "flag bound anew": ("is reassigned", insert("on_graph_path = bool(on_graph_path)")),
    "local bound twice": ("assigned twice", bind("lens", f"lens = {FIELD}\nlens = lens.long()")),
    "local bound by a with": (
        "assigned twice",
        bind("lens", f"lens = {FIELD}\nwith torch.no_grad() as lens:\n    pass"),
    ),
    "names unbound": ("not supported", insert("extra = 1\ndel extra")),
    "both names taken": ("something else", insert("prefix_lens = track_prefix_lens = 0")),
    "read before the fill": (
        "the inert fill comes after",
        insert(f"count = {FIELD}.shape[0]", before=f"        {MASK_TEST}"),
    ),
    "bound in a block, read outside": (
        "nested block",
        bind("lens", f"if rows >= 0:\n    lens = {FIELD}", used=False),
    ),
}

UNTRACKED_HEALS: dict[str, Edit] = {
    **{name: HEALS[name] for name in ("CR LF", "tab indentation", "torch as th")},
    "renamed arguments": rename(("forward_batch", "fb"), ("on_graph_path", "recorded")),
    "returns None": return_early(f"{MASK_TEST}\n    return None"),
    "on one line": return_early(f"{MASK_TEST} return"),
    "in brackets": return_early(f"if ({MASK_TEST[3:-1]}):\n    return"),
    "comment": return_early(f"{MASK_TEST}  # fork\n    # fork\n    return"),
    "does more": return_early(
        f"{MASK_TEST}\n    self.sconv_metadata.track_conv_indices = None\n    return"
    ),
}

UNTRACKED_REFUSED: dict[str, tuple[str, Edit]] = {
    "another condition": (
        "early return",
        return_early(f"{MASK_TEST[:-1]} or forward_batch.batch_size == 0:\n    return"),
    ),
    "else": ("early return", return_early(f"{MASK_TEST}\n    return\nelse:\n    pass")),
    "returns twice": ("early return", return_early(f"{MASK_TEST}\n    return\n" * 2)),
    "no rows": ("allocation", lambda text: text.replace(STATIC_INDICES, "_fork_rows")),
}

GUARDS = {
    "one test": f"lens = {FIELD}\nif on_graph_path and lens is None:\n    lens = {ZEROS}",
    "two tests": f"lens = {FIELD}\nif on_graph_path:\n    if lens is None:\n        lens = {ZEROS}",
    "an expression": f"lens = {ZEROS} if {FIELD} is None and on_graph_path else {FIELD}",
}
"""Guards that need no edit, in shapes that no release has."""

UNTRACKED = "0.5.17"
HEALING = [
    Variant("as it is", str, line_length=88),
    *(Variant(f"formatted at {n}", format_at(n), line_length=n) for n in (60, 79, 120, 200)),
    *(Variant(name, edit) for name, edit in HEALS.items()),
    Variant("untracked: as it is", str, source=UNTRACKED, line_length=88),
    *(
        Variant(f"untracked: formatted at {n}", format_at(n), source=UNTRACKED, line_length=n)
        for n in (60, 120)
    ),
    *(Variant(f"untracked: {name}", e, source=UNTRACKED) for name, e in UNTRACKED_HEALS.items()),
]
REFUSING = [
    *(Variant(name, edit, reason) for name, (reason, edit) in REFUSED.items()),
    *(
        Variant(f"untracked: {name}", edit, reason, UNTRACKED)
        for name, (reason, edit) in UNTRACKED_REFUSED.items()
    ),
]
