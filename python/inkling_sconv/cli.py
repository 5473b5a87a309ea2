"""``inkling-sconv``: what a tree does, and the edit that cures it."""

from __future__ import annotations

import difflib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

# The rest where it is needed: a command is there within a second.
from inkling_sconv import __version__, source
from inkling_sconv.git import GitError
from inkling_sconv.source import RefusedError, Shape
from inkling_sconv.tree import REFRESH, AbsentError, Tree, TreeError, opened

HEALTHY, NEEDS_THE_FIX, COULD_NOT_TELL = 0, 1, 2
STYLES = {"holds": "green", "limit": "yellow", "broken": "red"}

app = typer.Typer(
    help="Inkling's conv-state tracking under CUDA graphs: look at an SGLang tree, and cure it.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _tree(kinds: str) -> Any:
    text = f"{kinds} Default: the installed SGLang."
    return typer.Argument(metavar="TREE", help=text, show_default=False)


Readable = Annotated[Path | None, _tree("A checkout, a folder with sglang in it, or a wheel.")]
Editable = Annotated[Path | None, _tree("A checkout, or a folder with sglang in it.")]
InertFill = Annotated[
    bool, typer.Option("--inert-fill", help="On an untracked tree: add the inert track fields too.")
]


# ----------------------------------------------------------------------------------- doctor


@app.command()
def doctor(
    path: Readable = None,
    static: Annotated[
        bool, typer.Option("--static", help="Judge from the syntax tree alone; import nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Ask a tree for the whole contract, on CPU tensors.

    Exit 0: healthy; 1: needs the fix; 2: could not tell.

    Without TREE, SGLang's plugins are loaded first: the answer is what a server would run.
    """
    with _errors(), opened(path) as tree:
        report = _static(tree) if static else _examine(tree, installed=path is None)
    if as_json:
        print(json.dumps(report))
    else:
        _show(report)
    raise typer.Exit(report["exit"])


def _static(tree: Tree) -> dict[str, Any]:
    found = source.shape(tree.backend.read_bytes())
    codes = {Shape.GUARDED: HEALTHY, Shape.EXEMPT: HEALTHY, Shape.ABSENT: COULD_NOT_TELL}
    return {
        "tree": str(tree.root),
        "how": "from the syntax tree alone; nothing was run",
        "state": found.value,
        "setting": "",
        "exit": codes.get(found, NEEDS_THE_FIX),
        "rows": [],
    }


def _examine(tree: Tree, *, installed: bool) -> dict[str, Any]:
    """Run ``inkling_sconv.checks`` beside ``tree`` in a process of its own."""
    report: dict[str, Any] = {"tree": str(tree.root), "rows": [], "exit": COULD_NOT_TELL}
    module = ".".join(tree.backend.relative_to(tree.root).with_suffix("").parts)
    ours = Path(__file__).resolve().parent.parent
    paths = [str(tree.root), str(ours), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-W", "ignore", "-m", "inkling_sconv.checks", module]
    if installed:
        command.append("--plugins")
        report["plugin"] = _plugin_state()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it died without a word"]
        report |= {"state": "unknown", "why": lines[-1]}
        return report
    answer = json.loads(done.stdout.splitlines()[-1])
    report["how"] = "driven on CPU tensors" + (", SGLang's plugins loaded" if installed else "")
    if not answer["backends"]:
        return report | {"state": "absent", "why": f"no class defines {REFRESH}"}
    # A subclass without an override is not listed: what it does is what its base does.
    worst = max(answer["backends"], key=lambda b: sum(r["verdict"] == "broken" for r in b["rows"]))
    broken = any(row["verdict"] == "broken" for row in worst["rows"])
    if answer["bare"] and answer["bare"][0] != worst["state"]:
        report["bare"] = answer["bare"][0]
    return report | {
        "backend": worst["name"],
        "state": worst["state"],
        "rows": worst["rows"],
        "setting": worst["setting"],
        "exit": NEEDS_THE_FIX if broken else HEALTHY,
    }


def _plugin_state() -> str:
    """What keeps our plugin out of a server of this Python, or that nothing does."""
    from inkling_sconv import plugin

    if not plugin.is_installed():
        return "its entry point is missing: pip install sglang-inkling-sconv"
    if not plugin.is_allowed():
        return f"kept out by SGLANG_PLUGINS; add {plugin.PLUGIN} to it"
    values = {plugin.VARIABLE: "auto", plugin.FIXES_VARIABLE: "", plugin.DRAFT_EXTEND_VARIABLE: ""}
    values = {name: os.environ.get(name) or value for name, value in values.items()}
    return "loaded by servers, " + ", ".join(f"{n}={value}" for n, value in values.items() if value)


def _fix_for(row: dict[str, Any]) -> str:
    """The fix that mends a row that does not hold; empty where none does."""
    return "" if row["verdict"] == "holds" else row["fix"]


def _advice(report: dict[str, Any]) -> str:
    """What to change of the environment for the plugin to mend every row that a fix is for."""
    left = {*map(_fix_for, report["rows"])} - {""}
    if not left:
        return ""
    unset = []
    # A tree that was named is asked without plugins: no variable has kept it from being mended.
    if "plugin" in report:
        from inkling_sconv import plugin

        variables = (plugin.VARIABLE, plugin.FIXES_VARIABLE, plugin.DRAFT_EXTEND_VARIABLE)
        mode, fixes, form = (os.environ.get(name, "").strip().lower() for name in variables)
        hindering = {
            "SGLANG_PLUGINS": not plugin.is_allowed(),
            plugin.VARIABLE: mode == "off",
            plugin.FIXES_VARIABLE: fixes and not report["setting"],
            plugin.DRAFT_EXTEND_VARIABLE: form == "inert" and "draft-checkpoint" in left,
        }
        unset = [name for name, hinders in hindering.items() if hinders]
    steps = [f"unset {' and '.join(unset)}"] if unset else []
    steps += [f"set {report['setting']}"] if report["setting"] else []
    return ", ".join(steps)


def _next(report: dict[str, Any]) -> str:
    state, tree = report["state"], report["tree"]
    missing = re.search(
        r"No module named '([\w.]+)'|cannot import name .* from '([\w.]+)'", report.get("why", "")
    )
    if report["exit"] == COULD_NOT_TELL and missing:
        module = (missing[1] or missing[2]).split(".")[0]
        which = "" if missing[1] else " in the version that this SGLang pins"
        static = f"inkling-sconv doctor --static {tree}"
        return f"pip install {module}{which}, or judge without it: {static}"
    if report["exit"] == COULD_NOT_TELL:
        return f"inkling-sconv doctor --static {tree}"
    advice = _advice(report)
    if report["exit"] == HEALTHY and advice:
        return f"it starts and is safe; for more accepted tokens (docs/fixes.md), {advice}"
    if report["exit"] == HEALTHY:
        return "nothing: it starts and is safe"
    if state == "crashing":
        apply = f"inkling-sconv apply --diff {tree}"
        return f"{advice}, or {apply}" if advice and "plugin" in report else apply
    if state == "untracked":
        return advice or (
            "SGLang 0.5.18 or newer, or the plugin, which mends the runner; apply --inert-fill "
            "brings the method's half, not the runner's"
        )
    if advice:
        return f"{advice} for servers, or cherry-pick what stands beside the broken rows"
    return "read the broken rows: apply knows no edit for them"


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if report["rows"]:
        table = Table(title=f"{report['backend']} in {report['tree']}")
        for heading in ("", "asked", "upstream", "seen"):
            table.add_column(heading, overflow="fold")
        for row in report["rows"]:
            verdict = Text(row["verdict"], style=STYLES[row["verdict"]])
            fix = f"; mended by {_fix_for(row)}" if _fix_for(row) else ""
            table.add_row(verdict, row["asked"], row["change"], Text(row["seen"] + fix))
        console.print(table)
        limits = sum(row["verdict"] == "limit" for row in report["rows"])
        if limits and report["exit"] == HEALTHY:
            limit = "limit" if limits == 1 else "limits"
            print(f"{limits} {limit}: known, and harmless to what the server answers")
    if "plugin" in report:
        print(f"plugin: {report['plugin']}")
    why = f" ({report['why']})" if "why" in report else ""
    bare = f", {report['bare']} without plugins" if "bare" in report else ""
    how = f", {report['how']}" if "how" in report else ""
    print(f"state: {report['state']}{why}{bare}{how}")
    print(f"next: {_next(report)}")


# ------------------------------------------------------------------- apply, export, revert


@app.command()
def apply(
    path: Editable = None,
    inert_fill: InertFill = False,
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 1 if it would.")
    ] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Change nothing; print the edit.")] = False,
) -> None:
    """Put the guard into the tree's own file, then run doctor; what does not heal is put back."""
    from inkling_sconv.replace import replace, restore

    with _errors():
        tree = _editable(path)
        file = tree.backend
        before = file.read_bytes()
        after = _edited(file, before, inert_fill)
        if after == before:
            print(f"{file}: nothing to do; the guard is there")
            return
        if diff:
            sys.stdout.write(_diff(_relative(tree, file), before, after))
        if check or diff:
            if check:
                print(f"{file}: would be rewritten")
            raise typer.Exit(NEEDS_THE_FIX if check else 0)
        replace(file, before, after)
        print(f"{file}: written; checking it ...", flush=True)
        report = _examine(tree, installed=False)
        if report["state"] not in ("guarded", "exempt"):
            restore(file)
            seen = report.get("why") or "; ".join(
                row["seen"] for row in report["rows"] if row["verdict"] == "broken"
            )
            _fail(f"{file}: put back: after the edit it is {report['state']} ({seen})")
        print(f"state: {report['state']}")
        print("next: git diff; commit it; undo: revert")


@app.command()
def export(
    path: Editable = None,
    inert_fill: InertFill = False,
    branch: Annotated[
        str | None, typer.Option(metavar="NAME", help="Make a branch with the commit instead.")
    ] = None,
    base: Annotated[
        str, typer.Option(metavar="COMMIT", help="With --branch: what the commit is made on.")
    ] = "HEAD",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write the patch.")
    ] = None,
) -> None:
    """Print the edit as a patch that ``git am`` takes. The tree is not touched."""
    from inkling_sconv import patch
    from inkling_sconv.replace import write

    with _errors():
        tree = _editable(path)
        file = tree.backend

        def edit(before: bytes) -> bytes:
            return _edited(file, before, inert_fill)

        if branch is not None:
            made = patch.branch(file, edit, branch, base)
            if made is None:
                _fail(f"{base}: nothing to export; the guard is there", code=0)
            print(f"branch {branch}: {made}")
            print(f"next: git cherry-pick {made[:12]}, on any branch that crashes")
            return
        if patch.uncommitted(file):
            _say(f"{file}: has uncommitted edits; the patch is for HEAD and leaves them out")
        text = patch.mailbox(file, edit, _name_in_repository(tree, file))
        if text is None:
            _fail(f"{file}: nothing to export; the guard is there", code=0)
        if output is None:
            sys.stdout.buffer.write(text)
            return
        write(output, text)
        keep = " --keep-cr" if b"\r\n" in text else ""
        print(f"{output}: written\nnext: git am{keep} {output}")


@app.command()
def revert(path: Editable = None) -> None:
    """Put back, byte for byte, what apply found."""
    from inkling_sconv.replace import restore

    with _errors():
        file = _editable(path).backend
        if restore(file):
            print(f"{file}: as it was before apply")
        else:
            print(f"{file}: was back already")


def _editable(path: Path | None) -> Tree:
    if path is not None and path.suffix == ".whl":
        raise TreeError(f"{path}: a wheel is not edited; unpack it, and name the folder")
    with opened(path) as tree:
        return tree


def _edited(file: Path, before: bytes, inert_fill: bool) -> bytes:
    try:
        return source.fix(before, inert_fill=inert_fill, format_as=file).text
    except RefusedError as error:
        raise RefusedError(f"{file}: {error}; not touched. {source.by_hand(before)}") from None


def _name_in_repository(tree: Tree, file: Path) -> Path:
    """What a checkout of SGLang calls the file."""
    return Path("python") / file.relative_to(tree.root)


def _relative(tree: Tree, file: Path) -> Path:
    """The file's name from where ``git apply`` or ``patch -p1`` is run."""
    return file.relative_to(tree.root.parent if tree.root.name == "python" else tree.root)


def _diff(name: Path, before: bytes, after: bytes) -> str:
    # Only a newline ends a line of a patch; splitlines() ends one at a form feed too.
    old, new = (
        list(io.StringIO(text.decode(errors="replace"), newline="\n")) for text in (before, after)
    )
    return "".join(difflib.unified_diff(old, new, f"a/{name}", f"b/{name}"))


# ------------------------------------------------------------------------------ tiny, verify


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def tiny(context: typer.Context) -> None:
    """Write a small Inkling checkpoint with MTP heads; nothing is downloaded. See tiny --help."""
    from inkling_sconv import tiny as checkpoint

    # It has a parser of its own, so that a machine without this package's extras can write one.
    raise typer.Exit(checkpoint.main(context.args))


@app.command()
def verify(
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="An Inkling checkpoint with MTP heads. Default: tiny."),
    ] = None,
    log: Annotated[Path, typer.Option(metavar="FILE", help="Where the server's log goes.")] = Path(
        "inkling-sconv-server.log"
    ),
    timeout: Annotated[float, typer.Option(help="Seconds the server may take to start.")] = 600,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """On a GPU: start a server with MTP and CUDA graphs; compare what it says to the bit.

    Exit 0: everything is equal; 1: it is not, or the server failed; 2: this machine cannot tell.
    """
    import signal
    import tempfile

    from inkling_sconv import verify as verification

    lacking = verification.missing()
    if lacking is not None:
        _fail(f"verify: {lacking}")
    if not timeout > 0:
        _fail(f"verify: --timeout {timeout:g}: not a positive number of seconds")
    # As Ctrl-C does it: the server is ended on the way out. What nohup ignores stays ignored.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    from rich.console import Console

    console = Console(stderr=True)
    with _errors(), tempfile.TemporaryDirectory(prefix="inkling-sconv-") as folder:
        if model is None:
            from inkling_sconv import tiny as checkpoint

            model = Path(folder) / "tiny"
            checkpoint.write(model)
        try:
            vocabulary = verification.vocabulary(model)
        except ValueError as error:
            _fail(f"verify: {error}")
        with console.status("") as status:
            result = verification.verify(
                model, log, status.update, vocabulary=vocabulary, start_seconds=timeout
            )
    if as_json:
        print(json.dumps(result.as_dict()))
    else:
        _show_result(result)
    raise typer.Exit(0 if result.passed else 1)


def _show_result(result: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    if not result.comparisons:
        print(f"failed: {result.error}")
        return
    table = Table()
    for heading in ("compared", "floats", "differ", "largest", "cached tokens"):
        table.add_column(heading)
    for one in result.comparisons:
        figures = (one.compared, one.differing, one.largest)
        cached = " ".join(map(str, one.cached)) or "-"
        table.add_row(one.name, *map(str, figures), cached)
    Console().print(table)
    print(f"accept length {result.accept_length:.2f}; {result.distinct_tokens} distinct tokens")
    print("passed" if result.passed else f"failed: {result.error}")


# -------------------------------------------------------------------------- ci-init, watch


@app.command(name="ci-init")
def ci_init(
    path: Annotated[Path, typer.Argument(metavar="TREE", help="A fork's checkout.")],
) -> None:
    """Copy the registered tests and a workflow into a fork's checkout. Nothing is overwritten."""
    from inkling_sconv import ci

    with _errors():
        for written in ci.init(path):
            print(f"{written}: written")
    print(ci.NEXT)


@app.command()
def watch(
    release: Annotated[
        str | None, typer.Option(metavar="X", help="Look at this release only.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Look for SGLang releases newer than the last one that is known, and ask each for its state.

    Exit 0: nothing is new; 1: something is new or not recognised; 2: could not tell.
    """
    from inkling_sconv import watch as watching

    def say(what: str) -> None:
        if not as_json:
            print(f"{what} ...", flush=True)

    with _errors():
        answer = watching.watch(_examine_wheel, say, release)
    print(json.dumps(answer.as_dict()) if as_json else f"{answer.title}\n\n{answer.body}")
    raise typer.Exit(NEEDS_THE_FIX if answer.new else HEALTHY)


def _examine_wheel(wheel: Path) -> dict[str, Any]:
    """``_examine`` of a wheel; where its class cannot be driven, the syntax tree's state too."""
    with opened(wheel) as tree:
        try:
            report = _examine(tree, installed=False)
            if report["state"] == "unknown":
                broken = [row["seen"] for row in report["rows"] if row["verdict"] == "broken"]
                report = {"why": "; ".join(broken), **report, "static": _static(tree)["state"]}
        except AbsentError as error:
            return {"state": "absent", "why": str(error).removeprefix(f"{tree.root}: ")}
        except (TreeError, RefusedError) as error:
            return {"state": "unknown", "why": str(error).removeprefix(f"{tree.root}: ")}
        return report


# ----------------------------------------------------------------------------------- errors


class _errors:  # noqa: N801
    """Every error that is the user's to mend becomes one line on stderr and exit 2."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from inkling_sconv.ci import CiError
        from inkling_sconv.replace import ReplaceError
        from inkling_sconv.watch import WatchError

        mine = (TreeError, RefusedError, GitError, ReplaceError, CiError, WatchError)
        if isinstance(error, mine):
            _fail(str(error))
        if isinstance(error, OSError):
            _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _say(message: str) -> None:
    print(f"inkling-sconv: {message}", file=sys.stderr)


def _fail(message: str, code: int = COULD_NOT_TELL) -> NoReturn:
    _say(message)
    raise typer.Exit(code)


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


if __name__ == "__main__":
    app()
