"""The plugin's environment variables, and whether SGLang loads the plugin at all."""

from __future__ import annotations

import enum
import logging
import os
from importlib.metadata import entry_points
from typing import TypeVar

from inkling_sconv import __version__
from inkling_sconv.names import (
    DRAFT_EXTEND_VARIABLE,
    FIXES_VARIABLE,
    MODE_VARIABLE,
    PLUGIN,
    PLUGIN_GROUP,
    PLUGINS_VARIABLE,
)

logger = logging.getLogger("inkling_sconv")


class Mode(str, enum.Enum):
    """Values of ``INKLING_SCONV``: which backend classes get our refresh."""

    AUTO = "auto"
    """Crashing ones."""
    FAST = "fast"
    """Every recognised one, for speed."""
    FORCE = "force"
    """All but exempt ones, recognised or not, if our refresh works there."""
    OFF = "off"
    """No class, and no fix is applied."""


class DraftExtend(str, enum.Enum):
    """Values of ``INKLING_SCONV_DRAFT_EXTEND``: what our refresh does in draft-extend captures."""

    EXEMPT = "exempt"
    """Leave the batch alone, as SGLang does since 0.5.22."""
    INERT = "inert"
    """Fill inert track fields, as SGLang 0.5.18 - 0.5.21 do."""


_Choice = TypeVar("_Choice", Mode, DraftExtend)


def read_mode() -> Mode:
    """Read ``INKLING_SCONV``. An unknown value gives a warning and ``auto``."""
    return _read_choice(MODE_VARIABLE, Mode.AUTO)


def read_draft_extend() -> DraftExtend:
    """Read ``INKLING_SCONV_DRAFT_EXTEND``. An unknown value gives a warning and ``exempt``."""
    return _read_choice(DRAFT_EXTEND_VARIABLE, DraftExtend.EXEMPT)


def read_fix_names() -> set[str] | None:
    """Read the names in ``INKLING_SCONV_FIXES``, known or not.

    Returns:
        None if the variable is unset or empty; the empty set if it says ``none``.
    """
    value = os.environ.get(FIXES_VARIABLE, "").strip()
    if not value:
        return None
    return {name.strip().lower() for name in value.split(",")} - {"", "none"}


def is_installed() -> bool:
    """Whether this Python finds our entry point for SGLang's plugins."""
    return PLUGIN in {entry.name for entry in entry_points(group=PLUGIN_GROUP)}


def is_allowed() -> bool:
    """Whether ``SGLANG_PLUGINS`` is unset, or lists this plugin."""
    names = {name.strip() for name in os.environ.get(PLUGINS_VARIABLE, "").split(",")} - {""}
    return not names or PLUGIN in names


def log(level: int, message: str) -> None:
    """Log one line under our name and version."""
    logger.log(level, "inkling_sconv %s: %s", __version__, message)


def describe_error(error: BaseException) -> str:
    """Return ``TYPE: MESSAGE``, like the last line of a traceback."""
    return f"{type(error).__name__}: {error}"


def _read_choice(variable: str, default: _Choice) -> _Choice:
    """Read ``variable`` as a member of ``default``'s enum."""
    choices = type(default)
    value = os.environ.get(variable, "").strip().lower() or default.value
    try:
        return choices(value)
    except ValueError:
        valid = ", ".join(choice.value for choice in choices)
        log(
            logging.WARNING,
            f"{variable}={value!r} is not one of {valid}; using {default.value}.",
        )
        return default
