"""The entry point that SGLang's ``load_plugins()`` calls.

``register()`` only waits: nothing of SGLang is imported before SGLang imports its Inkling backend
itself. Then the backend is driven once on CPU tensors, and our refresh is put in its place where
that cures something.
"""

from __future__ import annotations

import enum
import logging
import os
import sys
from importlib.metadata import entry_points
from types import FunctionType, ModuleType
from typing import Any

import wrapt

from inkling_sconv import __version__

BACKEND_MODULE = "sglang.srt.layers.attention.linear.inkling_sconv_backend"
GROUP = "sglang.srt.plugins"
PLUGIN = "inkling_sconv"
DISTRIBUTION = "sglang-inkling-sconv"
VARIABLE = "INKLING_SCONV"
DRAFT_EXTEND_VARIABLE = "INKLING_SCONV_DRAFT_EXTEND"
FIXES_VARIABLE = "INKLING_SCONV_FIXES"

logger = logging.getLogger(__name__)


class Mode(str, enum.Enum):
    """Values of ``INKLING_SCONV``."""

    AUTO = "auto"
    """Graft where the class crashes."""
    FAST = "fast"
    """Graft for speed where nothing needs a cure: untracked, guarded and exempt classes too."""
    FORCE = "force"
    """Graft wherever our refresh fits: untracked, guarded and unrecognised classes too."""
    OFF = "off"
    """Change nothing."""

    @classmethod
    def from_environment(cls) -> Mode:
        """The mode asked for; auto, with a warning, where the value is none of them."""
        value = os.environ.get(VARIABLE, "").strip().lower() or cls.AUTO.value
        try:
            return cls(value)
        except ValueError:
            names = ", ".join(mode.value for mode in cls)
            _log(logging.WARNING, f"{VARIABLE}={value!r} is none of {names}; using auto.")
            return cls.AUTO


def register() -> None:
    """Have SGLang's Inkling backend looked at when SGLang imports it, at once if it already has."""
    wrapt.register_post_import_hook(_on_import, BACKEND_MODULE)


def is_installed() -> bool:
    """Whether SGLang finds our entry point."""
    return PLUGIN in {entry.name for entry in entry_points(group=GROUP)}


def is_allowed() -> bool:
    """Whether ``SGLANG_PLUGINS``, where it is set, lists us."""
    names = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")} - {""}
    return not names or PLUGIN in names


def _on_import(module: ModuleType) -> None:
    # What is raised here would propagate into SGLang's own import.
    try:
        mode = Mode.from_environment()
        if mode is Mode.OFF:
            _log(logging.INFO, f"{VARIABLE}=off; {module.__name__} left alone.")
            return
        from inkling_sconv import probe

        backends = probe.find_backends(module)
        if not backends:
            _log(logging.WARNING, f"no class in {module.__name__} has {probe.REFRESH}; left alone.")
        states = {_treat(backend, mode) for backend in backends}
        if backends:
            from inkling_sconv import fixes

            fixes.await_runners(backends, {state.value for state in states}, _log)
    except Exception as error:
        _log(
            logging.ERROR, f"could not look at {module.__name__} ({_describe(error)}); left alone."
        )


def _treat(backend: type, mode: Mode) -> Any:
    """Decide what ``backend`` needs, do it, and log the one line that says so.

    Returns the state in which it was found.
    """
    from inkling_sconv import probe

    report = probe.classify(backend)
    if report.state is probe.State.GRAFTED:
        return report.state
    if (foreign := _foreign_hook(backend)) is not None:
        _log(
            logging.WARNING,
            f"{backend.__qualname__}.{foreign}; left alone. Keep the other plugin out with "
            "SGLANG_PLUGINS to let this one decide.",
        )
        return report.state
    found = f"{backend.__qualname__} is {report.state.value} ({report.why})"
    known = report.state is not probe.State.UNKNOWN
    if report.state is probe.State.CRASHING or (mode is Mode.FAST and known):
        _graft(backend, found, must_exempt=report.state is probe.State.EXEMPT)
    elif report.state is probe.State.EXEMPT:
        refused = ""
        if mode is Mode.FORCE:
            refused = f" {VARIABLE}=force is refused here; fast replaces the method."
        _log(logging.INFO, f"{found}: healthy, draft-extend is exempt; left alone.{refused}")
    elif mode is Mode.FORCE:
        _graft(backend, found)
    elif report.state is probe.State.GUARDED:
        _log(logging.INFO, f"{found}: healthy, the guard is there; left alone.")
    elif report.state is probe.State.UNTRACKED:
        _log(
            logging.INFO,
            f"{found}: starts; its tracking needs more than this method; left alone.",
        )
    else:
        _log(
            logging.WARNING,
            f"{found}: not recognised; left alone. {VARIABLE}=force replaces the method.",
        )
    return report.state


def _graft(backend: type, found: str, *, must_exempt: bool = False) -> None:
    """Put our methods on ``backend``; take them off again if they do not hold there."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    from inkling_sconv import probe
    from inkling_sconv.backend import InklingSconvBackend

    methods = (probe.REFRESH, probe.ALLOC)
    originals = {name: vars(backend)[name] for name in methods if name in vars(backend)}

    def alloc(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        InklingSconvBackend._alloc_inert_tracking(instance, exempt_draft_extend=exempt)

    exempt = _exempts_draft_extend(must_exempt)
    # Not through the registry: it walks every loaded module for each target, 30 ms a time.
    wrapt.wrap_function_wrapper(backend, probe.ALLOC, alloc)
    HookRegistry.register(
        _target(backend, probe.REFRESH),
        InklingSconvBackend._refresh_track_conv_indices,
        HookType.REPLACE,
        source=HookSource(PLUGIN, DISTRIBUTION),
    )
    HookRegistry.apply_hooks()

    # The registry logs what goes wrong, and skips a target that it patched before.
    report = probe.classify(backend)
    if report.state is probe.State.GRAFTED:
        _log(
            logging.WARNING,
            f"{found}: replaced {probe.REFRESH}, extended {probe.ALLOC}. "
            f"{VARIABLE}=off turns this off.",
        )
        return
    for name in methods:
        if name in originals:
            setattr(backend, name, originals[name])
        elif name in vars(backend):
            delattr(backend, name)
    _log(
        logging.ERROR,
        f"{found}: our {probe.REFRESH} does not hold here ({report.why}); taken back.",
    )


def _exempts_draft_extend(must: bool) -> bool:
    """Whether our method leaves draft-extend alone: yes, unless ``inert`` is asked for.

    ``must``: the runner stages the draft's checkpoint slots, which inert ones would overwrite.
    """
    value = os.environ.get(DRAFT_EXTEND_VARIABLE, "").strip().lower() or "exempt"
    if value not in ("exempt", "inert"):
        _log(
            logging.WARNING,
            f"{DRAFT_EXTEND_VARIABLE}={value!r} is none of exempt, inert; using exempt.",
        )
    elif value == "inert" and must:
        _log(logging.WARNING, f"{DRAFT_EXTEND_VARIABLE}=inert is refused here; using exempt.")
    return must or value != "inert"


def _foreign_hook(backend: type) -> str | None:
    """``METHOD is ... by WHOM`` where somebody else has a hand on a method that we would touch."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from inkling_sconv import probe

    own_globals = vars(sys.modules[backend.__module__])
    # The registry has no public way to ask what is registered.
    registered = getattr(HookRegistry, "_hooks", {})
    for name in (probe.REFRESH, probe.ALLOC):
        for _, hook, source in registered.get(_target(backend, name), ()):
            who = f"plugin {source.plugin_name}" if source else _describe_function(hook)
            return f"{name} is already hooked by {who}"
        method = vars(backend).get(name)
        # By type, not isinstance: proxies pretend to be functions.
        if method is not None and not (
            type(method) is FunctionType and method.__globals__ is own_globals
        ):
            return f"{name} is already replaced by {_describe_function(method)}"
    return None


def _target(backend: type, method: str) -> str:
    return f"{backend.__module__}.{backend.__qualname__}.{method}"


def _describe_function(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _log(level: int, message: str) -> None:
    logger.log(level, "inkling_sconv %s: %s", __version__, message)
