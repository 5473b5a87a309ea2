"""``python -m inkling_sconv``: what this installation does to the SGLang beside it.

One line for the method, and one for each fix of what is around it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import sys

from inkling_sconv import __version__
from inkling_sconv.names import BACKEND_MODULE, PLUGIN, PLUGIN_GROUP


def main() -> int:
    """Load SGLang's plugins, import its Inkling backend, print what the plugin says of it.

    Returns 0 if the plugin was asked; 1 if it never will be, with the reason on stderr.
    """
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
        # What is installed beside it may be too new, or too old.
        what = f"{type(error).__name__}: {error}"
        reason = f"SGLang does not import: {what}; install the versions that it pins."
    if reason is None:
        return 0
    print(f"inkling_sconv {__version__}: {reason}", file=sys.stderr)
    return 1


def _import_runners() -> None:
    """Import what fixes wait for: some of it a server imports when it speculates."""
    from inkling_sconv.plugin.fixes import FIXES

    for fix in FIXES:
        with contextlib.suppress(Exception):
            importlib.import_module(fix.module)


def _why_unreachable() -> str | None:
    """Why SGLang would never call ``register()`` here; None if it will."""
    from inkling_sconv.plugin import settings

    if importlib.util.find_spec("sglang") is None:
        return f"SGLang is not installed for {sys.executable}; install it there."
    group = PLUGIN_GROUP
    if importlib.util.find_spec("sglang.srt") is None or importlib.util.find_spec(group) is None:
        return (
            f"this SGLang is older than the plugin door ({group}); upgrade it to 0.5.17 or newer."
        )
    if not settings.is_installed():
        return "the entry point is missing; install the package with pip."
    if not settings.is_allowed():
        return f"SGLANG_PLUGINS keeps this plugin out; add {PLUGIN} to it, or unset it."
    return None


def command() -> None:
    """``inkling-sconv``, or the line that says what it needs."""
    try:
        from inkling_sconv.cli import app

        app()
    except ModuleNotFoundError as error:
        if error.name not in ("libcst", "rich", "typer"):
            raise
        needed = "pip install 'sglang-inkling-sconv[cli]'"
        sys.exit(f"inkling-sconv: {error.name} is not installed; {needed}")


if __name__ == "__main__":
    sys.exit(main())
