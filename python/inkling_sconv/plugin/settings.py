"""The plugin's environment variables, and whether SGLang loads the plugin at all."""

import enum
import logging
import os
from collections.abc import Set
from importlib.metadata import entry_points
from typing import TypeVar

from inkling_sconv import __version__
from inkling_sconv.errors import make_line
from inkling_sconv.names import (
    DRAFT_EXTEND_VARIABLE,
    FIXES_VARIABLE,
    MODE_VARIABLE,
    PLUGIN,
    PLUGIN_GROUP,
    PLUGINS_VARIABLE,
)

logger = logging.getLogger("inkling_sconv")
_OFF = ("off", "0", "false", "no", "none")


class Mode(str, enum.Enum):
    """Values of ``INKLING_SCONV``: which backend classes get our refresh."""

    AUTO = "auto"
    """Replace crashing classes."""
    FAST = "fast"
    """Replace every recognised class, for speed."""
    FORCE = "force"
    """Replace every class except exempt ones, recognised or not, if our refresh works there."""
    OFF = "off"
    """Change nothing. ``0``, ``false``, ``no`` and ``none`` mean this too."""

    @classmethod
    def _missing_(cls, value: object) -> "Mode | None":
        return cls.OFF if value in _OFF else None


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
        The names in lower case, ``none`` included; None if the variable is unset or empty.
    """
    value = os.environ.get(FIXES_VARIABLE, "").strip()
    if not value:
        return None
    return {name.strip().lower() for name in value.split(",")} - {""}


def is_installed() -> bool:
    """Whether this Python finds our entry point for SGLang's plugins."""
    return PLUGIN in {entry.name for entry in entry_points(group=PLUGIN_GROUP)}


def is_allowed() -> bool:
    """Whether ``SGLANG_PLUGINS`` is unset, or lists this plugin."""
    names = {name.strip() for name in os.environ.get(PLUGINS_VARIABLE, "").split(",")} - {""}
    return not names or PLUGIN in names


def describe_plugin() -> str:
    """Describe whether servers load the plugin, and which variables are set."""
    if not is_installed():
        return "its entry point is missing: pip install sglang-inkling-sconv"
    if not is_allowed():
        return f"kept out by {PLUGINS_VARIABLE}; add {PLUGIN} to it"
    values = {MODE_VARIABLE: Mode.AUTO.value, FIXES_VARIABLE: "", DRAFT_EXTEND_VARIABLE: ""}
    values = {name: os.environ.get(name) or default for name, default in values.items()}
    return ", ".join(
        ["loaded by servers", *(f"{n}={value}" for n, value in values.items() if value)]
    )


def list_obstacles(fixes: Set[str], setting: str) -> list[str]:
    """List the variables that keep ``fixes`` from being applied.

    Args:
        fixes: names of fixes that the plugin does not apply now.
        setting: what ``advice.advise_setting`` returns.
    """
    mode, named, form = (
        os.environ.get(name, "").strip().lower()
        for name in (MODE_VARIABLE, FIXES_VARIABLE, DRAFT_EXTEND_VARIABLE)
    )
    obstacles = {
        PLUGINS_VARIABLE: not is_allowed(),
        MODE_VARIABLE: mode in _OFF,
        FIXES_VARIABLE: bool(named) and not setting,
        DRAFT_EXTEND_VARIABLE: form == DraftExtend.INERT
        and not fixes.isdisjoint({"draft-extend", "draft-checkpoint"}),
    }
    return [name for name, hinders in obstacles.items() if hinders]


def log(level: int, message: str) -> None:
    """Log one line that begins with our name and version; what is not printable is escaped."""
    logger.log(level, "inkling_sconv %s: %s", __version__, make_line(message))


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
