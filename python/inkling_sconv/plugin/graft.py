"""Replace the Inkling backend's refresh if its state and ``INKLING_SCONV`` call for it.

The class is probed before and after the replacement. If our refresh fails the second probe, the
original methods are restored. Every error is logged, and SGLang's import goes on.
"""

import logging
import sys
from types import FunctionType, ModuleType
from typing import Any

import wrapt

from inkling_sconv.errors import describe_error
from inkling_sconv.names import (
    ALLOC_GRAPH_BUFFERS,
    DISTRIBUTION,
    DRAFT_EXTEND_VARIABLE,
    MODE_VARIABLE,
    PLUGIN,
    REFRESH,
)
from inkling_sconv.plugin.settings import (
    DraftExtend,
    Mode,
    log,
    read_draft_extend,
    read_mode,
)


def inspect_backends(module: ModuleType) -> None:
    """Replace the refresh of each class in ``module`` that needs it, then install the fixes.

    Never raises: an exception would propagate into SGLang's own import.
    """
    try:
        mode = read_mode()
        if mode is Mode.OFF:
            log(logging.INFO, f"{MODE_VARIABLE}=off; {module.__name__} left alone.")
            return
        from inkling_sconv.plugin.fixes import install_fixes
        from inkling_sconv.probe.backend import find_backends

        backends = find_backends(module)
        if not backends:
            log(logging.WARNING, f"no class in {module.__name__} defines {REFRESH}; left alone.")
            return
        states = {_replace_if_needed(backend, mode) for backend in backends}
        install_fixes(backends, {state.value for state in states})
    except Exception as error:
        log(
            logging.ERROR,
            f"could not inspect {module.__name__} ({describe_error(error)}); left alone.",
        )


def _replace_if_needed(backend: type, mode: Mode) -> Any:
    """Replace the refresh of ``backend`` if its state and ``mode`` call for it, and log one line.

    Returns the ``State`` found before any replacement.
    """
    from inkling_sconv.probe.backend import State, classify

    report = classify(backend)
    if report.state is State.GRAFTED:
        return report.state
    if (foreign := _describe_foreign_hook(backend)) is not None:
        log(
            logging.WARNING,
            f"{backend.__qualname__}.{foreign}; left alone. To let this plugin decide, remove the "
            "other one.",
        )
        return report.state
    found = f"{backend.__qualname__} is {report.state.value} ({report.why})"
    known = report.state is not State.UNKNOWN
    if report.state is State.CRASHING or (mode is Mode.FAST and known):
        _graft(backend, found, must_exempt=report.state is State.EXEMPT)
    elif report.state is State.EXEMPT:
        refused = ""
        if mode is Mode.FORCE:
            refused = f" {MODE_VARIABLE}=force is refused here; fast replaces the method."
        log(logging.INFO, f"{found}: healthy, draft-extend is exempt; left alone.{refused}")
    elif mode is Mode.FORCE:
        _graft(backend, found)
    elif report.state is State.GUARDED:
        log(logging.INFO, f"{found}: healthy, the guard is there; left alone.")
    elif report.state is State.UNTRACKED:
        log(
            logging.INFO,
            f"{found}: starts; this method alone would not fix its tracking; left alone.",
        )
    else:
        log(
            logging.WARNING,
            f"{found}: not recognised; left alone. {MODE_VARIABLE}=force replaces the method.",
        )
    return report.state


def _graft(backend: type, found: str, *, must_exempt: bool = False) -> None:
    """Put our methods on ``backend``, and restore its own if ours fail there."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    from inkling_sconv.plugin.backend import InklingSconvBackend
    from inkling_sconv.probe.backend import State, classify

    methods = (REFRESH, ALLOC_GRAPH_BUFFERS)
    originals = {name: vars(backend)[name] for name in methods if name in vars(backend)}
    exempt = _exempts_draft_extend(must_exempt)

    def alloc(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        InklingSconvBackend._alloc_inert_tracking(instance, exempt_draft_extend=exempt)

    # Wrapped directly: the registry scans every loaded module for each target, 30 ms.
    wrapt.wrap_function_wrapper(backend, ALLOC_GRAPH_BUFFERS, alloc)
    HookRegistry.register(
        _target(backend, REFRESH),
        InklingSconvBackend._refresh_track_conv_indices,
        HookType.REPLACE,
        source=HookSource(PLUGIN, DISTRIBUTION),
    )
    HookRegistry.apply_hooks()

    # The registry only logs its errors, and silently skips a target that it patched before.
    report = classify(backend)
    if report.state is State.GRAFTED:
        log(
            logging.WARNING,
            f"{found}: replaced {REFRESH}, extended {ALLOC_GRAPH_BUFFERS}. "
            f"{MODE_VARIABLE}=off turns this off.",
        )
        return
    for name in methods:
        if name in originals:
            setattr(backend, name, originals[name])
        elif name in vars(backend):
            delattr(backend, name)
    log(
        logging.ERROR,
        f"{found}: our {REFRESH} fails here ({report.why}); the original is restored.",
    )


def _exempts_draft_extend(must: bool) -> bool:
    """Whether our refresh is to leave draft-extend alone.

    ``must``: the runner sets the draft's checkpoint slots, which inert fields would overwrite.
    """
    form = read_draft_extend()
    if form is DraftExtend.INERT and must:
        log(logging.WARNING, f"{DRAFT_EXTEND_VARIABLE}=inert is refused here; using exempt.")
    return must or form is DraftExtend.EXEMPT


def _describe_foreign_hook(backend: type) -> str | None:
    """Describe another plugin's hook on a method that we replace; None if there is none."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    own_globals = vars(sys.modules[backend.__module__])
    # The registry has no public way to list its hooks.
    registered = getattr(HookRegistry, "_hooks", {})
    for name in (REFRESH, ALLOC_GRAPH_BUFFERS):
        for _, hook, source in registered.get(_target(backend, name), ()):
            who = f"plugin {source.plugin_name}" if source else _describe_function(hook)
            return f"{name} is already hooked by {who}"
        method = vars(backend).get(name)
        # ``type()``, because isinstance accepts wrapt's proxies.
        if method is not None and not (
            type(method) is FunctionType and method.__globals__ is own_globals
        ):
            return f"{name} is already replaced by {_describe_function(method)}"
    return None


def _target(backend: type, method: str) -> str:
    return f"{backend.__module__}.{backend.__qualname__}.{method}"


def _describe_function(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"
