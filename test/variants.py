"""Forks of the backend's file, each made at test time by an edit of a release's own text.

No line of SGLang is kept here: an edit names only the few tokens that it changes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import releases

REFRESH = "_refresh_track_conv_indices"
CLASS = "InklingShortConvAttnBackend"
FIELD = "forward_batch.extend_prefix_lens"
ZEROS = "torch.zeros_like(forward_batch.mamba_track_seqlens)"
LIVE = "        live = min("
MASK_TEST = "if forward_batch.mamba_track_mask is None:"
RUFF = shutil.which("ruff", path=str(Path(sys.executable).parent)) or "ruff"


@dataclass(frozen=True)
class Variant:
    """``line_length`` is the one it is formatted at; None where it is not."""

    name: str
    edit: Callable[[str], bytes]
    heals: bool
    source: str = releases.CRASHING
    line_length: int | None = None
    reason: str = ""

    def text(self) -> bytes:
        return self.edit(releases.backend_text(self.source))


def sub(text: str, *edits: tuple[str, str]) -> str:
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return text


def split(text: str) -> tuple[str, str, str]:
    """What is before the method, the method, and what comes after it."""
    start = text.index(f"    def {REFRESH}")
    end = text.index("\n    def ", start) + 1
    return text[:start], text[start:end], text[end:]


def in_method(*edits: tuple[str, str]) -> Callable[[str], str]:
    def edit(text: str) -> str:
        head, method, tail = split(text)
        return head + sub(method, *edits) + tail

    return edit


def before_live(code: str) -> Callable[[str], str]:
    """``code`` just before the first read of the prefix lengths."""
    code = textwrap.indent(textwrap.dedent(code).strip("\n") + "\n", " " * 8)
    return in_method((LIVE, code + LIVE))


def with_local(name: str, code: str, used: bool = True) -> Callable[[str], str]:
    """``code`` binds the local ``name``, which stands for the field from there on."""

    def edit(text: str) -> str:
        if used:
            text = in_method((FIELD, name))(text)
        return before_live(code)(text)

    return edit


def signature(new: str) -> Callable[[str], str]:
    def edit(text: str) -> str:
        head, method, tail = split(text)
        pattern = re.compile(rf"def {REFRESH}\(.*?\):\n", re.DOTALL)
        assert pattern.search(method)
        return head + pattern.sub(lambda _: f"def {REFRESH}({new}:\n", method) + tail

    return edit


def calls_by_name(text: str) -> str:
    call = f"self.{REFRESH}(forward_batch, on_graph_path)"
    return sub(text, (call, call.replace(", on", ", on_graph_path=on")))


def body(text: str) -> tuple[str, str, str]:
    """As ``split``, with the signature and docstring in the first part."""
    head, method, tail = split(text)
    place = method.index("        if forward_batch.mamba_track_mask is None")
    return head + method[:place], method[place:], tail


def nested(opening: str) -> Callable[[str], str]:
    """Everything from the first read on in a block of its own."""

    def edit(text: str) -> str:
        head, method, tail = body(text)
        place = method.index(LIVE)
        inner = textwrap.indent(method[place:], "    ")
        return f"{head}{method[:place]}        {opening}\n{inner}{tail}"

    return edit


def comments_everywhere(text: str) -> str:
    head, method, tail = body(text)
    parts = re.split(r"(?m)^(?=        [a-z])", method)
    return head + "        # fork\n".join(["", *parts[1:]]) + tail


def guarded_class(text: str) -> str:
    start = text.index(f"class {CLASS}(")
    end = text.index("\nclass ", start)
    return text[:start] + "if True:\n" + textwrap.indent(text[start:end], "    ") + text[end:]


def subclass(method: bool) -> Callable[[str], str]:
    def edit(text: str) -> str:
        if method:
            return f"{text}\n\nclass Fork({CLASS}):\n{split(text)[1]}"
        override = f"""
            class Fork({CLASS}):
                def {REFRESH}(self, batch, graph):
                    super().{REFRESH}(batch, graph)
        """
        return f"{text}\n\n{textwrap.dedent(override)}"

    return edit


def flat_fill(text: str) -> str:
    """The early return as an ``if`` of its own, before the fill's."""
    return in_method(
        (f"        {MASK_TEST}\n            if not", f"        {MASK_TEST[:-1]} and not"),
        ("            return\n", f"            return\n        {MASK_TEST}\n"),
    )(text)


def one_line_method(text: str) -> str:
    head, _, tail = split(text)
    line = f"    def {REFRESH}(self, b, g): b.mamba_track_mask = 0; b.extend_prefix_lens\n\n"
    return head + line + tail


def without_method(text: str) -> str:
    head, _, tail = split(text)
    return head + tail


def prefix_before_fill(text: str) -> str:
    head, rest, tail = body(text)
    return f"{head}        count = {FIELD}.shape[0]\n{rest}{tail}"


def guard_in_fill(test: str) -> Callable[[str], str]:
    guard = f"            if {test}:\n                lens = {ZEROS}\n"

    def edit(text: str) -> str:
        head, rest, tail = body(text)
        rest = sub(rest, (FIELD, "lens"))
        place = rest.index("        rows = forward_batch.batch_size\n        query")
        rest = rest[:place] + guard + rest[place:]
        return f"{head}        lens = {FIELD}\n{rest}{tail}"

    return edit


def formatted(line_length: int) -> Callable[[str], bytes]:
    def edit(text: str) -> bytes:
        command = [RUFF, "format", "--isolated", f"--line-length={line_length}", "-"]
        return subprocess.run(command, input=text.encode(), check=True, capture_output=True).stdout

    return edit


def tabs(text: str) -> str:
    return re.sub(r"(?m)^(?: {4})+", lambda m: "\t" * (len(m[0]) // 4), text)


def trailing_blanks(text: str) -> str:
    head, method, tail = split(text)
    return head + re.sub(r"(?m)(?<=[\w)\],:])$", "  \t", method) + tail


def mixed_newlines(text: str) -> bytes:
    lines = text.splitlines()
    return b"".join(
        line.encode() + (b"\r\n" if number % 3 else b"\n") for number, line in enumerate(lines)
    )


def newlines(new: str) -> Callable[[str], bytes]:
    return lambda text: text.replace("\n", new).encode()


def latin_1(text: str) -> bytes:
    return ("# -*- coding: latin-1 -*-\n# Café, naïve, ½\n" + text).encode("latin-1")


def renamed(*pairs: tuple[str, str]) -> Callable[[str], str]:
    def edit(text: str) -> str:
        head, method, tail = split(text)
        for old, new in pairs:
            method, count = re.subn(rf"(?<![\w.]){old}\b", new, method)
            assert count, old
        return head + method + tail

    return edit


def alias_torch(text: str) -> str:
    return re.sub(
        r"(?<!import )\btorch\.", "th.", sub(text, ("import torch\n", "import torch as th\n"))
    )


def appended(code: str) -> Callable[[str], str]:
    return lambda text: text + "\n\n" + textwrap.dedent(code)


def early_return(new: str) -> Callable[[str], str]:
    """Another shape of the untracked tree's early return."""

    def edit(text: str) -> str:
        head, method, tail = split(text)
        pattern = re.compile(rf"(?m)^ {{8}}{re.escape(MASK_TEST)}\n {{12}}return\n")
        assert len(pattern.findall(method)) == 1
        code = textwrap.indent(textwrap.dedent(new).strip("\n") + "\n", " " * 8)
        return head + pattern.sub(lambda _: code, method) + tail

    return edit


_ALL: list[Variant] = []


def _add(heals: bool, name: str, edit: Callable[[str], str | bytes], **more: object) -> None:
    def encoded(text: str) -> bytes:
        new = edit(text)
        return new if isinstance(new, bytes) else new.encode()

    _ALL.append(Variant(name, encoded, heals, **more))


def _heals(name: str, edit: Callable[[str], str | bytes], **more: object) -> None:
    _add(True, name, edit, **more)


def _refuses(name: str, reason: str, edit: Callable[[str], str | bytes], **more: object) -> None:
    _add(False, name, edit, reason=reason, **more)


_heals("as it is", str, line_length=88)
for _length in (60, 79, 120, 200):
    _heals(f"formatted at {_length}", formatted(_length), line_length=_length)
_heals("CRLF", newlines("\r\n"), line_length=88)
_refuses("CR", "lone CR", newlines("\r"))
_heals("mixed newlines", mixed_newlines)
_heals("tabs in comments", before_live("#\tfork:\tkept\there\nrows = rows\t#\tfork"))
_heals("tab indentation", tabs)
_heals("trailing blanks", trailing_blanks)
_heals("byte order mark", lambda text: b"\xef\xbb\xbf" + text.encode())
_heals("latin-1", latin_1)
_heals("no final newline", lambda text: text.rstrip("\n"))
_heals("form feed", lambda text: sub(text, ("\nclass ", "\n\f\nclass ")))
_heals("not ASCII", before_live("label = 'préfixe ✓ 前缀'"))
_heals(
    "renamed arguments",
    renamed(("forward_batch", "fb"), ("on_graph_path", "recorded"), ("self", "this")),
)
_heals("renamed locals", renamed(("live", "n_live"), ("rows", "n_rows")))
_heals(
    "keyword-only",
    lambda text: calls_by_name(signature("self, forward_batch, *, on_graph_path)")(text)),
)
_heals("positional-only", signature("self, forward_batch, on_graph_path, /)"))
_heals("a default", signature("self, forward_batch, on_graph_path=False)"))
_heals("one argument more", signature("self, forward_batch, on_graph_path, layer=None)"))
_heals("no annotations", signature("self, forward_batch, on_graph_path)"))
_heals(
    "annotations",
    signature("self: object, forward_batch: 'ForwardBatch', on_graph_path: 'bool') -> 'None'"),
)
_heals(
    "statements in another order",
    lambda text: before_live("rows = forward_batch.batch_size")(
        in_method(("        rows = forward_batch.batch_size\n        query", "        query"))(text)
    ),
)
_heals(
    "logging",
    before_live(
        """
        import logging

        logging.getLogger(__name__).debug("rows %s, graph %s", rows, on_graph_path)
        """
    ),
)
_heals(
    "logging that asks for draft-extend",
    before_live("if forward_batch.forward_mode.is_draft_extend_v2():\n    kind = 'draft'"),
)
_heals("half applied: bound and used", with_local("prefix_lens", f"prefix_lens = {FIELD}"))
_heals("half applied: bound", with_local("prefix_lens", f"prefix_lens = {FIELD}", used=False))
_heals("bound under another name", with_local("lens", f"lens = {FIELD}"))
_heals("annotated binding", with_local("lens", f"lens: torch.Tensor = {FIELD}"))
_heals("two names at once", with_local("lens", f"lens = other = {FIELD}\nrows += 0 * len(other)"))
_heals("bound in a tuple", with_local("lens", f"lens, rows = {FIELD}, rows"))
_heals("walrus", with_local("lens", f"int((lens := {FIELD}).shape[0])"))
_heals("the local's name is taken", before_live("prefix_lens = 0"))
_heals("import torch as th", alias_torch)
_heals("class renamed", lambda text: text.replace(CLASS, "ForkSconvBackend"))
_heals("override that calls its base", subclass(method=False))
_heals("two definitions", subclass(method=True))
_heals("class under an if", guarded_class)
_heals("slices over lines", in_method(("[:live]", "[\n            :live\n            ]")))
_heals("decorated", in_method((f"    def {REFRESH}", f"    @torch.no_grad()\n    def {REFRESH}")))
_heals(
    "async elsewhere",
    appended(
        """
        async def fork(source):
            async with source as items:
                return [await item async for item in items if (seen := item)]

        def kind(value):
            match value:
                case {"a": [1, *_]} | None:
                    return f"{value!r:>{10}}"
        """
    ),
)
_heals("comments between statements", comments_everywhere)
_heals("None on the left", in_method((MASK_TEST, "if None is forward_batch.mamba_track_mask:")))
_heals("two ifs instead of one in the other", flat_fill)
_heals("in a with", nested("with torch.no_grad():"))
_heals("in an if", nested("if rows >= 0:"))
_heals(
    "in a try",
    lambda text: sub(
        nested("try:")(text),
        ("\n    def commit", "        finally:\n            pass\n\n    def commit"),
    ),
)
_heals("read in a condition", before_live(f"if {FIELD}.shape[0] < 0:\n    rows = rows"))
_heals("read in a loop", before_live(f"for _ in range(1):\n    {FIELD}.shape"))
_heals("several statements on a line", before_live(f"one = 1; two = {FIELD}.shape[0]; del_ = 3"))
_heals("inner function that reads something else", before_live("def inner():\n    return rows"))

_refuses(
    "guard on None alone",
    "treated here already",
    lambda text: with_local(
        "lens",
        f"lens = {FIELD}\nif lens is None:\n    lens = {ZEROS}",
    )(text),
)
_refuses("guard in the fill", "treated here already", guard_in_fill("lens is None"))
_refuses(
    "whole guard in the fill",
    "treated here already",
    guard_in_fill("lens is None and on_graph_path"),
)
_refuses(
    "raises where it should guard",
    "treated here already",
    with_local("lens", f"lens = {FIELD}\nif lens is None and on_graph_path:\n    raise ValueError"),
)
_refuses(
    "written into the batch",
    "is assigned",
    before_live(f"{FIELD} = {FIELD}.to(torch.int64)"),
)
_refuses(
    "read through another name",
    "another name",
    lambda text: before_live("fb = forward_batch\nfb.extend_prefix_lens.shape")(text),
)
_refuses(
    "read by getattr",
    "another name",
    before_live("getattr(forward_batch, 'extend_prefix_lens').shape"),
)
_refuses(
    "bound and used on one line",
    "on its line",
    with_local("lens", f"lens = {FIELD}; count = lens.shape[0]"),
)
_refuses(
    "merge conflict",
    "not Python",
    before_live("<<<<<<< ours\nx = 1\n=======\nx = 2\n>>>>>>> theirs"),
)
_refuses("syntax error", "not Python", lambda text: text + "\ndef broken(:\n")
_refuses("bytes that are not UTF-8", "cannot be read", lambda text: text.encode() + b"# caf\xe9\n")
_refuses("an encoding that does not exist", "not Python", lambda text: "# coding: klingon\n" + text)
_refuses("NUL bytes", "not Python", lambda text: text + "\0")
_refuses("empty", "no class here", lambda text: "")
_refuses("10 MB", "bytes", lambda text: text + "# padding\n" * 1_000_000)
_refuses(
    "too deep", "nested deeper", lambda text: text + "\nTOTAL = " + "+".join(["1"] * 20_000) + "\n"
)
_refuses(
    "too deep in the method", "nested deeper", before_live("total = " + "+".join(["1"] * 1500))
)
_refuses("inner function", "an inner function", before_live(f"count = lambda: {FIELD}.shape[0]"))
_refuses("batch bound anew", "assigned anew", before_live("forward_batch = forward_batch"))
_refuses(
    "graph flag bound anew", "assigned anew", before_live("on_graph_path = bool(on_graph_path)")
)
_refuses("read before the fill", "the inert fill comes after", prefix_before_fill)
_refuses("too few arguments", "which one", signature("self, forward_batch)"))
_refuses("no method", "no class here", without_method)
_refuses("method of another name", "no class here", lambda text: text.replace(REFRESH, "_windows"))
_refuses(
    "local bound twice", "assigned twice", with_local("lens", f"lens = {FIELD}\nlens = lens.long()")
)
_refuses(
    "local bound by a with",
    "assigned twice",
    with_local("lens", f"lens = {FIELD}\nwith torch.no_grad() as lens:\n    pass"),
)
_heals("bound in a block", with_local("lens", f"if rows >= 0:\n    lens = {FIELD}"))
_refuses(
    "bound in a block, read outside",
    "block of its own",
    with_local("lens", f"if rows >= 0:\n    lens = {FIELD}", used=False),
)
_refuses("one line", "on one line", one_line_method)
_refuses("names unbound", "unbound", before_live("extra = 1\ndel extra"))
_refuses("both names taken", "something else", before_live("prefix_lens = track_prefix_lens = 0"))
_refuses(
    "no torch",
    "does not import torch",
    lambda text: sub(text, ("import torch\n", "torch = __import__('torch')\n")),
)
_refuses("untracked", "--inert-fill", str, source="0.5.17")

UNTRACKED = {"source": "0.5.17"}
_heals("untracked: as it is", str, line_length=88, **UNTRACKED)
for _length in (60, 120):
    _heals(
        f"untracked: formatted at {_length}", formatted(_length), line_length=_length, **UNTRACKED
    )
_heals("untracked: CRLF", newlines("\r\n"), **UNTRACKED)
_heals("untracked: tab indentation", tabs, **UNTRACKED)
_heals(
    "untracked: renamed arguments",
    renamed(("forward_batch", "fb"), ("on_graph_path", "recorded")),
    **UNTRACKED,
)
_heals("untracked: import torch as th", alias_torch, **UNTRACKED)
_heals("untracked: returns None", early_return(f"{MASK_TEST}\n    return None"), **UNTRACKED)
_heals("untracked: on one line", early_return(f"{MASK_TEST} return"), **UNTRACKED)
_heals(
    "untracked: does more",
    early_return(f"{MASK_TEST}\n    self.sconv_metadata.track_conv_indices = None\n    return"),
    **UNTRACKED,
)
_heals("untracked: in brackets", early_return(f"if ({MASK_TEST[3:-1]}):\n    return"), **UNTRACKED)
_heals(
    "untracked: comment", early_return(f"{MASK_TEST}  # fork\n    # fork\n    return"), **UNTRACKED
)
_refuses(
    "untracked: another condition",
    "early return",
    early_return(f"{MASK_TEST[:-1]} or forward_batch.batch_size == 0:\n    return"),
    **UNTRACKED,
)
_refuses(
    "untracked: else",
    "early return",
    early_return(f"{MASK_TEST}\n    return\nelse:\n    pass"),
    **UNTRACKED,
)
_refuses(
    "untracked: returns twice",
    "early return",
    early_return(f"{MASK_TEST}\n    return\n{MASK_TEST}\n    return"),
    **UNTRACKED,
)
_refuses(
    "untracked: no rows",
    "allocation",
    lambda text: text.replace("_graph_track_conv_indices", "_fork_rows"),
    **UNTRACKED,
)

VARIANTS = tuple(_ALL)

GUARDS = {
    "one test": f"lens = {FIELD}\nif on_graph_path and lens is None:\n    lens = {ZEROS}",
    "two tests": f"lens = {FIELD}\nif on_graph_path:\n    if lens is None:\n        lens = {ZEROS}",
    "an expression": f"lens = {ZEROS} if {FIELD} is None and on_graph_path else {FIELD}",
}
"""Guards that need no edit, in shapes that no release has."""
