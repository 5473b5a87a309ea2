"""What the environment asks of the plugin, and whether SGLang loads it at all."""

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
    """Values of ``INKLING_SCONV``: on which states the plugin replaces the refresh."""

    AUTO = "auto"
    """On crashing classes."""
    FAST = "fast"
    """On every recognised class, for speed."""
    FORCE = "force"
    """On every class where our refresh fits, recognised or not, except exempt ones."""
    OFF = "off"
    """On none; and no fix is applied."""


class DraftExtend(str, enum.Enum):
    """Values of ``INKLING_SCONV_DRAFT_EXTEND``: what our refresh does in draft-extend captures."""

    EXEMPT = "exempt"
    """Leaves the batch alone, as SGLang does since 0.5.22."""
    INERT = "inert"
    """Fills inert track fields, as SGLang 0.5.18 - 0.5.21 do."""


_Choice = TypeVar("_Choice", Mode, DraftExtend)


def read_mode() -> Mode:
    """The mode that the environment asks for; ``auto``, with a warning, for an unknown value."""
    return _read_choice(MODE_VARIABLE, Mode.AUTO)


def read_draft_extend() -> DraftExtend:
    """The form of draft-extend; ``exempt``, with a warning, for an unknown value."""
    return _read_choice(DRAFT_EXTEND_VARIABLE, DraftExtend.EXEMPT)


def read_fix_names() -> set[str] | None:
    """The names in ``INKLING_SCONV_FIXES``, known or not; None where it is unset or empty.

    ``none`` is the empty set.
    """
    value = os.environ.get(FIXES_VARIABLE, "").strip()
    if not value:
        return None
    return {name.strip().lower() for name in value.split(",")} - {"", "none"}


def is_installed() -> bool:
    """Whether SGLang finds our entry point."""
    return PLUGIN in {entry.name for entry in entry_points(group=PLUGIN_GROUP)}


def is_allowed() -> bool:
    """Whether ``SGLANG_PLUGINS``, where it is set, lists us."""
    names = {name.strip() for name in os.environ.get(PLUGINS_VARIABLE, "").split(",")} - {""}
    return not names or PLUGIN in names


def log(level: int, message: str) -> None:
    """Log one line under our name and version."""
    logger.log(level, "inkling_sconv %s: %s", __version__, message)


def describe_error(error: BaseException) -> str:
    """``TYPE: MESSAGE``, as the last line of a traceback has it."""
    return f"{type(error).__name__}: {error}"


def _read_choice(variable: str, default: _Choice) -> _Choice:
    """The member of ``default``'s enum that ``variable`` names."""
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
