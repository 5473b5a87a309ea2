"""Report what the plugin does to the SGLang that this Python imports.

``python -m inkling_sconv`` prints what a server would log: a line for the backend and for each fix.
"""

import contextlib
import importlib
import importlib.util
import logging
import sys
import warnings

from inkling_sconv import __version__
from inkling_sconv.errors import Interrupted, describe_error, give_reason, make_line
from inkling_sconv.names import BACKEND_MODULE, PLUGIN, PLUGIN_GROUP


def main() -> int:
    """Load SGLang's plugins and its Inkling backend, and print what the plugin logs.

    Returns:
        0: the plugin was loaded, or this SGLang has no Inkling backend. 1: a server would not load
        the plugin; the reason is on stderr.
    """
    # Hide SGLang's warnings about missing GPUs and libraries.
    warnings.simplefilter("ignore")
    try:
        reason = _why_unreachable()
        if reason is None:
            plugins = importlib.import_module(PLUGIN_GROUP)
            logging.getLogger("inkling_sconv").setLevel(logging.INFO)
            logging.basicConfig(format="%(message)s", stream=sys.stdout, level=logging.ERROR)
            plugins.load_plugins()
            importlib.import_module(BACKEND_MODULE)
            _import_runners()
    except ModuleNotFoundError as error:
        if error.name == BACKEND_MODULE:
            print(
                f"inkling_sconv {__version__}: this SGLang has no Inkling backend; nothing to do."
            )
            return 0
        reason = f"SGLang does not import: {error}; install what it needs."
    except ImportError as error:
        reason = f"SGLang does not import: {error}."
    except Exception as error:
        # Importing SGLang runs code of its dependencies, whose versions may not match.
        what = describe_error(error)
        reason = f"SGLang does not import: {what}; install the versions that it pins."
    if reason is None:
        return 0
    print(f"inkling_sconv {__version__}: {make_line(reason)}", file=sys.stderr)
    return 1


def _import_runners() -> None:
    """Import the modules that fixes change: a server imports some only when it speculates."""
    from inkling_sconv.plugin.fixes import FIXES

    for fix in FIXES:
        with contextlib.suppress(Exception):
            importlib.import_module(fix.module)


def _why_unreachable() -> str | None:
    """Say why SGLang would never call ``register()`` here. None if it would."""
    from inkling_sconv.plugin import settings

    if importlib.util.find_spec("sglang") is None:
        return f"SGLang is not installed for {sys.executable}; install it there."
    if None in map(importlib.util.find_spec, ("sglang.srt", PLUGIN_GROUP)):
        return f"this SGLang has no plugins ({PLUGIN_GROUP}); upgrade it to 0.5.17 or newer."
    if not settings.is_installed():
        return "the entry point is missing; install the package with pip."
    if not settings.is_allowed():
        return f"SGLANG_PLUGINS keeps this plugin out; add {PLUGIN} to it, or unset it."
    return None


def command() -> None:
    """Run ``inkling-sconv``, or say what to install for it."""
    try:
        from inkling_sconv.cli import app
        from inkling_sconv.cli.common import ignore_signals, prepare_process

        prepare_process()
        try:
            app()
        finally:
            ignore_signals()
    except (ModuleNotFoundError, KeyboardInterrupt, Interrupted) as error:
        # Before the commands are there, which is where Typer is missing, or after they have ended.
        print(f"inkling-sconv: {give_reason(error)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    sys.exit(main())
