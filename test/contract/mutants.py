"""The contract's tests against wrong versions of our own method: each must turn a test red.

``test/unit/test_mutants.py`` runs them inside the crashing fork and prints the table.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

BACKEND = "inkling_sconv.backend"
WINDOWS = "inkling_sconv.windows"
EARLY_RETURN = (
    "if forward_batch.mamba_track_mask is None and (\n"
    "            not on_graph_path or _is_exempt(self, forward_batch)\n"
    "        ):"
)
NO_INDICES = "            metadata.track_conv_indices = None\n"
FILL = "                _inert_tracking(self, forward_batch).fill(forward_batch, rows)\n"
EXEMPT = "    return exempt and forward_batch.forward_mode.is_draft_extend_v2()\n"


@dataclass(frozen=True)
class Mutant:
    """Replacements in the source of one of our modules; each ``old`` stands there exactly once."""

    name: str
    module: str
    edits: tuple[tuple[str, str], ...]

    def source(self) -> str:
        text = inspect.getsource(importlib.import_module(self.module))
        for old, new in self.edits:
            assert text.count(old) == 1, (
                f"mutant {self.name!r}: {text.count(old)} places of {old!r}"
            )
            text = text.replace(old, new)
        return text


def mutant(name: str, module: str, *edits: tuple[str, str]) -> Mutant:
    return Mutant(name, module, edits)


REJECTED_DESIGNS = (
    mutant(
        "design: revert #34043",
        BACKEND,
        (EARLY_RETURN, "if forward_batch.mamba_track_mask is None:"),
    ),
    mutant(
        "design: guard on None alone",
        BACKEND,
        ("        if prefix_lens is None and on_graph_path:", "        if prefix_lens is None:"),
        ("if rows > 0 and not Inert", "if on_graph_path and rows > 0 and not Inert"),
    ),
    mutant(
        "design: guard inside the inert fill",
        BACKEND,
        ("        out = None\n", "        out = None\n        filled = False\n"),
        (FILL, f"{FILL}                filled = True\n"),
        (
            "        if prefix_lens is None and on_graph_path:",
            "        if prefix_lens is None and filled:",
        ),
    ),
    mutant(
        "design: return early for prefill",
        BACKEND,
        (
            "not on_graph_path or _is_exempt(self, forward_batch)\n",
            "not on_graph_path or _is_exempt(self, forward_batch)\n"
            '            or forward_batch.forward_mode.name == "EXTEND"\n',
        ),
    ),
)

NO_GUARD = mutant(
    "no guard",
    BACKEND,
    ("        if prefix_lens is None and on_graph_path:", "        if False:"),
)

ONE_LINERS = (
    mutant("tail not zeroed", WINDOWS, ("    out[live:].zero_()\n", "")),
    mutant(
        "no lower clamp",
        WINDOWS,
        ("(ends[:, None] + offsets).clamp_(min=0)", "(ends[:, None] + offsets)"),
    ),
    mutant("no upper clamp", WINDOWS, ("last_token, out=", "last_token + (1 << 40), out=")),
    mutant("no tokens gives -1", WINDOWS, ("- 1).clamp_(min=0)", "- 1)")),
    mutant("truncating division", WINDOWS, ('rounding_mode="floor"', 'rounding_mode="trunc"')),
    mutant(
        "no chunk alignment",
        WINDOWS,
        (
            "    ends = query_start_loc[:live] + aligned",
            "    ends = query_start_loc[:live] + tracked",
        ),
    ),
    mutant("prefix added", WINDOWS, ("tracked - prefix_lens", "tracked + prefix_lens")),
    mutant("prefix ignored", WINDOWS, ("tracked - prefix_lens[:live]", "tracked")),
    mutant(
        "window one row late", WINDOWS, ("torch.arange(-window, 0,", "torch.arange(1 - window, 1,")
    ),
    mutant(
        "window backwards",
        WINDOWS,
        ("torch.arange(-window, 0, device", "torch.arange(-1, -window - 1, -1, device"),
    ),
    mutant(
        "live ignores prefix lengths",
        WINDOWS,
        ("        live = min(live, prefix_lens.shape[0])\n", "        pass\n"),
    ),
    mutant(
        "live ignores track seqlens",
        WINDOWS,
        ("live = min(rows, track_seqlens.shape[0])", "live = rows"),
    ),
    mutant(
        "int32 indices",
        WINDOWS,
        ("(rows, window), dtype=torch.int64", "(rows, window), dtype=torch.int32"),
    ),
    mutant(
        "last token read on the host",
        WINDOWS,
        (
            "(query_start_loc[-1:].to(torch.int64) - 1)",
            "(query_start_loc[-1:].to(torch.int64) * 0 + int(query_start_loc[-1]) - 1)",
        ),
    ),
    NO_GUARD,
    mutant("no early return", BACKEND, (EARLY_RETURN, "if False:")),
    mutant("an early return keeps old indices", BACKEND, (NO_INDICES, "")),
    mutant(
        "exempt keeps old indices",
        BACKEND,
        (NO_INDICES, f"            if not on_graph_path:\n    {NO_INDICES}"),
    ),
    mutant(
        "exempt ignores the mask",
        BACKEND,
        (
            EARLY_RETURN,
            "if (forward_batch.mamba_track_mask is None and not on_graph_path) or (\n"
            "            _is_exempt(self, forward_batch)\n"
            "        ):",
        ),
    ),
    mutant("exempt for every mode", BACKEND, (EXEMPT, "    return exempt\n")),
    mutant("never exempt", BACKEND, (EXEMPT, "    return False\n")),
    mutant(
        "exempt though inert is asked for",
        BACKEND,
        (EXEMPT, "    return forward_batch.forward_mode.is_draft_extend_v2()\n"),
    ),
    mutant(
        "exempt off by default",
        BACKEND,
        ("exempt_draft_extend: bool = True", "exempt_draft_extend: bool = False"),
    ),
    mutant(
        "an older backend is not exempt",
        BACKEND,
        ('"_inkling_sconv_exempt_draft_extend", True)', '"_inkling_sconv_exempt_draft_extend", 0)'),
    ),
    mutant(
        "exempt drops the checkpoint slots",
        BACKEND,
        (NO_INDICES, f"{NO_INDICES}            forward_batch.mamba_track_indices = None\n"),
    ),
    mutant(
        "exempt fills the inert fields",
        BACKEND,
        (
            NO_INDICES,
            f"{NO_INDICES}            if on_graph_path and hasattr(self, '_inkling_sconv_inert'):\n"
            "                self._inkling_sconv_inert.fill(forward_batch, rows)\n",
        ),
    ),
    mutant(
        "exempt drops the destinations",
        BACKEND,
        (NO_INDICES, f"{NO_INDICES}            metadata.track_cache_indices = None\n"),
    ),
    mutant(
        "exempt checks the bound",
        BACKEND,
        (
            NO_INDICES,
            f"{NO_INDICES}            assert rows <= self._graph_track_conv_indices.shape[0]\n",
        ),
    ),
    mutant(
        "destinations not inert",
        BACKEND,
        ("metadata.track_cache_indices = forward_batch.mamba_track_indices\n", "pass\n"),
    ),
    mutant(
        "destinations where there is no place for them",
        BACKEND,
        ('if hasattr(metadata, "track_cache_indices"):', "if True:"),
    ),
    mutant(
        "live destinations overwritten",
        BACKEND,
        (
            "        track_seqlens = forward_batch.mamba_track_seqlens\n",
            "        track_seqlens = forward_batch.mamba_track_seqlens\n"
            '        if hasattr(metadata, "track_cache_indices"):\n'
            "            metadata.track_cache_indices = forward_batch.mamba_track_indices\n",
        ),
    ),
    mutant(
        "guard inverted",
        BACKEND,
        (
            "if prefix_lens is None and on_graph_path:",
            "if prefix_lens is None and not on_graph_path:",
        ),
    ),
    mutant(
        "buffer reallocated",
        BACKEND,
        (
            "            out = buffer[:rows]\n",
            "            out = torch.zeros_like(buffer[:rows])\n",
        ),
    ),
    mutant(
        "eager writes the graph buffer",
        BACKEND,
        ("        out = None\n", "        out = self._graph_track_conv_indices[:rows]\n"),
    ),
    mutant("bound not checked", BACKEND, ("if rows > buffer.shape[0]:", "if False:")),
    mutant(
        "bound off by one", BACKEND, ("if rows > buffer.shape[0]:", "if rows >= buffer.shape[0]:")
    ),
    mutant("inert mask True", BACKEND, ("self.mask = torch.zeros(", "self.mask = torch.ones(")),
    mutant(
        "inert indices not the dummy slot",
        BACKEND,
        ("self.indices = torch.zeros(", "self.indices = torch.ones("),
    ),
    mutant(
        "inert indices left out",
        BACKEND,
        ("        forward_batch.mamba_track_indices = self.indices[:rows]\n", ""),
    ),
    mutant(
        "inert fields allocated per call", BACKEND, ("self.mask[:rows]", "self.mask[:rows].clone()")
    ),
    mutant(
        "unmasked rows accepted",
        BACKEND,
        ("if rows > 0 and not InertTracking.owns(forward_batch.mamba_track_mask):", "if False:"),
    ),
    mutant(
        "own mask only",
        BACKEND,
        ("for mask in (self.mask, host_mask):", "for mask in (self.mask,):"),
    ),
    mutant(
        "addresses never forgotten",
        BACKEND,
        ("        weakref.WeakValueDictionary()\n", "        {}\n"),
    ),
    mutant(
        "zero rows refused", BACKEND, ("if rows > 0 and not InertTracking", "if not InertTracking")
    ),
    mutant("missing seqlens accepted", BACKEND, ("if track_seqlens is None:", "if False:")),
    mutant(
        "prefix written into the batch",
        BACKEND,
        (
            "        metadata.track_conv_indices = track_conv_indices(\n",
            "        if prefix_lens is None:\n"
            "            forward_batch.extend_prefix_lens = torch.zeros_like(track_seqlens)\n"
            "        metadata.track_conv_indices = track_conv_indices(\n",
        ),
    ),
    mutant(
        "prefix of ones",
        WINDOWS,
        (
            "        tracked = tracked - prefix_lens[:live]\n",
            "        tracked = tracked - prefix_lens[:live]\n"
            "    else:\n"
            "        tracked = tracked - 1\n",
        ),
    ),
)

CONTROLS = (mutant("unchanged backend.py", BACKEND), mutant("unchanged windows.py", WINDOWS))
"""Built as the mutants are, with nothing wrong in them: all green, or the table means nothing."""

MUTANTS = (*REJECTED_DESIGNS, *ONE_LINERS)


def build(wrong: Mutant, host: type, **form: bool) -> type:
    """A subclass of ``host`` whose methods are ours with ``wrong`` in them.

    ``form`` is what its ``_alloc_inert_tracking`` is given; nothing means the default.
    """
    module = types.ModuleType(wrong.module)
    exec(compile(wrong.source(), f"<{wrong.name}>", "exec"), vars(module))
    if wrong.module == WINDOWS:
        # backend.py imports the arithmetic by name: give a copy of it the wrong one.
        windows, module = module, types.ModuleType(BACKEND)
        exec(inspect.getsource(importlib.import_module(BACKEND)), vars(module))
        vars(module)["track_conv_indices"] = track_conv_indices.track_conv_indices_ref
    ours = module.InklingSconvBackend

    def alloc(self) -> None:
        super(subclass, self)._alloc_graph_buffers()
        ours._alloc_inert_tracking(self, **form)

    subclass = type(
        "Mutant",
        (host,),
        {
            "_alloc_graph_buffers": alloc,
            "_refresh_track_conv_indices": ours._refresh_track_conv_indices,
        },
    )
    return subclass


class _Recorder:
    """Hands ``subject`` a class, and keeps which tests it turned red."""

    def __init__(self, subject: type):
        self.subject = subject
        self.red: dict[str, bool] = {}

    def pytest_configure(self, config: pytest.Config) -> None:
        config.mutant_class = self.subject

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.split("::")[-1].split("[")[0]
        self.red[name] = self.red.get(name, False) or report.failed


def run(subject: type) -> dict[str, bool]:
    """``{test: whether it is red}`` with ``subject`` in the place of the grafted class."""
    recorder = _Recorder(subject)
    options = ["-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options.append("--hypothesis-profile=mutants")
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main([*options, str(HERE)], plugins=[recorder])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"pytest did not run ({code!r}):\n{output.getvalue()}")
    return recorder.red


def results() -> dict[str, dict[str, bool]]:
    """``{control or mutant: {test: whether it is red}}``; run where SGLang is the crashing fork."""
    from inkling_sconv import names
    from inkling_sconv.probe import backend as probe
    from sglang.srt.plugins import load_plugins

    load_plugins()
    grafted = probe.find_backends(importlib.import_module(names.BACKEND_MODULE))[0]
    bare = {
        name: inspect.unwrap(vars(grafted)[name])
        for name in (names.ALLOC_GRAPH_BUFFERS, names.REFRESH)
    }
    host = type("Host", (grafted,), bare)
    return {m.name: run(build(m, host)) for m in (*CONTROLS, *MUTANTS)}
