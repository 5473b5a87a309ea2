"""The contract's tests, run in a process that has one SGLang tree and our plugin.

``subject`` is the backend class that SGLang ends up with; ``mutants.py`` gives other classes.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from inkling_sconv import names
from inkling_sconv.probe.backend import Rig, find_backends
from sglang.srt.plugins import load_plugins

settings.register_profile("contract", max_examples=100, deadline=None, derandomize=True)
# A mutant only has to be caught: no need to shrink what caught it.
settings.register_profile(
    "mutants", settings.get_profile("contract"), phases=[Phase.generate], report_multiple_bugs=False
)
settings.load_profile("contract")

load_plugins()
MODULE = importlib.import_module(names.BACKEND_MODULE)


@pytest.fixture(scope="session")
def subject() -> type:
    return find_backends(MODULE)[0]


@pytest.fixture(scope="session")
def metadata_class() -> type:
    """The tree's own class of a step's metadata."""
    own = (c for c in vars(MODULE).values() if getattr(c, "__module__", "") == MODULE.__name__)
    (found,) = (c for c in own if "track_conv_indices" in getattr(c, "__annotations__", ()))
    return found


@pytest.fixture(scope="session")
def build_rig(subject: type, metadata_class: type) -> Callable[..., Rig]:
    """Makes a rig with the tree's own metadata; ``form`` is that of draft-extend."""

    def build(form: str, **options: Any) -> Rig:
        rig = Rig(subject, **options)
        rig.backend.sconv_metadata = metadata_class()
        rig.backend._inkling_sconv_exempt_draft_extend = form == "exempt"
        return rig

    return build


@pytest.fixture(params=("exempt", "inert"))
def form(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_rig(build_rig: Callable[..., Rig], form: str) -> Callable[..., Rig]:
    return functools.partial(build_rig, form)
