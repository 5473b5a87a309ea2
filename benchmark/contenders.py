"""The servers that benchmarks compare, and how they are started.

A contender is one of

stock         the installed SGLang, plugin off
default       the installed SGLang with the plugin and nothing set
guard         the crashing fork after ``inkling-sconv apply``, plugin off
exempt        the crashing fork with the plugin, no fix
inert         the same with ``INKLING_SCONV_DRAFT_EXTEND=inert``
[fast+]FIXES  the installed SGLang with these fixes, such as ``fast+draft-checkpoint,draft-window``

``INKLING_SCONV_CRASHING_TREE`` names the crashing fork. Otherwise it is made of the installed
SGLang: as it was between #34043 and #35042.
"""

import argparse
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "test/registered/inkling"))

from inkling_sconv.errors import UserError
from inkling_sconv.names import CRASHING_TREE_VARIABLE
from inkling_sconv.plugin import settings
from inkling_sconv.plugin.fixes import FIXES
from inkling_sconv.proof import checkpoint, verify
from inkling_sconv.proof.server import Server, ServerError
from rich.console import Console

STOCK, DEFAULT, GUARD, EXEMPT, INERT = "stock", "default", "guard", "exempt", "inert"
NAMES = (STOCK, DEFAULT, GUARD, EXEMPT, INERT)
FIX_NAMES = [fix.name for fix in FIXES]

Key = TypeVar("Key")


def make_environment(name: str) -> dict[str, str]:
    """The variables with which a server is the contender ``name``; its fork is made if need be.

    Raises:
        UserError: no crashing fork can be made of the installed SGLang.
    """
    if name == STOCK:
        return {"INKLING_SCONV": "off"}
    if name == DEFAULT:
        return {}
    if name not in NAMES:
        mode, plus, fixes = name.rpartition("+")
        return {"INKLING_SCONV": mode if plus else "auto", "INKLING_SCONV_FIXES": fixes}
    import harness

    crashing = harness.make_crashing_fork()
    if name == GUARD:
        applied = harness.make_applied_tree(crashing)
        return harness.make_environment(applied, INKLING_SCONV="off")
    form = "inert" if name == INERT else "exempt"
    variables = {"INKLING_SCONV_FIXES": "none", "INKLING_SCONV_DRAFT_EXTEND": form}
    return harness.make_environment(crashing, **variables)


def begin(
    options: argparse.Namespace, console: Console
) -> tuple[dict[str, dict[str, str]], dict[str, Any]]:
    """Each contender's variables, and what they are measured on, which is printed.

    Raises:
        UserError: as ``make_environment``.
    """
    import harness

    environments = {name: make_environment(name) for name in options.contenders}
    machine = harness.describe_machine()
    about = ", ".join(f"{name} {value}" for name, value in machine.items())
    console.print(f"{about}\nlogs: {options.log_dir}")
    return environments, machine


def write_models(folder: Path, heads: Sequence[int]) -> dict[int, Path]:
    """Write a tiny checkpoint into ``folder`` for each number of MTP heads."""
    models = {count: folder / str(count) for count in heads}
    for count, model in models.items():
        checkpoint.write_checkpoint(model, mtp_heads=count)
    return models


@contextlib.contextmanager
def start_servers(servers: Mapping[Key, Server]) -> Iterator[dict[Key, ServerError | None]]:
    """Start ``servers`` at once. Yields why each failed to start, or None, and ends all of them."""

    def wait(server: Server) -> ServerError | None:
        try:
            server.wait()
        except ServerError as error:
            return error
        return None

    with ThreadPoolExecutor(max(1, len(servers))) as pool, contextlib.ExitStack() as stack:
        # Launched by this thread, which an interrupt reaches: none is launched after the stop.
        for server in servers.values():
            stack.callback(server.stop)
            server.launch()
        yield dict(zip(servers, pool.map(wait, servers.values()), strict=True))


def label(name: str, heads: int) -> str:
    """A contender as records name it."""
    return f"{name}, {heads} heads"


def make_log(folder: Path, *parts: object) -> Path:
    """The log of a server that ``parts`` tell from others; contenders' names are among them."""
    stem = "-".join(map(str, parts)).replace("+", "-").replace(",", "-")
    return folder / f"server-{stem}.log"


class Parser(argparse.ArgumentParser):
    """A parser with the options that every benchmark of contenders has."""

    def __init__(self, prog: str, description: str | None):
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog=__doc__,
        )
        self.add_argument("contenders", nargs="+", type=parse_contender, metavar="CONTENDER")
        self.add_argument("--heads", type=parse_count, nargs="+", default=[2], metavar="N")
        self.add_argument("--json", type=Path, metavar="OUT", help="write summaries there")
        self.add_argument("--log-dir", type=Path, metavar="DIR", help="default: a temporary folder")

    def error(self, message: str) -> NoReturn:
        """End the process with one line and exit 2."""
        self.exit(2, f"{self.prog}: {message}\n")

    def parse(self, command_line: Sequence[str] | None) -> argparse.Namespace:
        """The options; a wrong one ends the process with one line and exit 2."""
        options = self.parse_args(command_line)
        for given in (options.contenders, options.heads):
            for one in given:
                if given.count(one) > 1:
                    self.error(f"{one} is named twice")
        if options.json and not options.json.absolute().parent.is_dir():
            self.error(f"--json {options.json}: no such folder")
        return options


def parse_contender(text: str) -> str:
    """A contender's name, checked."""
    fixes = text.removeprefix("fast+").split(",")
    if text not in NAMES and not set(fixes) <= {*FIX_NAMES}:
        valid = f"{', '.join(NAMES)}, or fixes: {', '.join(FIX_NAMES)}"
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {valid}")
    return text


def parse_count(text: str) -> int:
    """A number of requests, or of MTP heads."""
    if not (text.isdecimal() and 1 <= int(text) <= 8):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 8")
    return int(text)


def run_as_script(
    name: str, options: argparse.Namespace, run: Callable[[argparse.Namespace, Console], int]
) -> int:
    """Run a benchmark where servers can run. An error of the user's is one line and exit 2."""
    # A contender gets its own variables and no others.
    for variable in [
        v for v in os.environ if v.startswith("INKLING_SCONV") and v != CRASHING_TREE_VARIABLE
    ]:
        del os.environ[variable]
    try:
        if (reason := verify.why_unavailable()) is not None:
            raise UserError(reason)
        if not (settings.is_installed() and settings.is_allowed()):
            raise UserError("SGLang would not load the plugin: python -m inkling_sconv says why")
        options.log_dir = (options.log_dir or Path(tempfile.mkdtemp())).resolve()
        options.log_dir.mkdir(parents=True, exist_ok=True)
        # As Ctrl-C does it: the servers are ended on the way out.
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, signal.default_int_handler)
        return run(options, Console(width=None if sys.stdout.isatty() else 220))
    except (UserError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
