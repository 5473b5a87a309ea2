"""The contract, run inside a process that has one SGLang tree and our plugin.

``subject`` is the backend class that SGLang ends up with. ``test/contract/mutants.py`` puts another
class in its place.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from inkling_sconv import names
from inkling_sconv.probe import backend as probe
from sglang.srt.plugins import load_plugins

settings.register_profile("contract", max_examples=150, deadline=None, derandomize=True)
# A mutant only has to be caught: no need to shrink what caught it.
settings.register_profile(
    "mutants", settings.get_profile("contract"), max_examples=60, phases=[Phase.generate]
)
settings.load_profile("contract")

load_plugins()
MODULE = importlib.import_module(names.BACKEND_MODULE)


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> type:
    mutant = getattr(request.config, "mutant_class", None)
    return mutant or probe.find_backends(MODULE)[0]


@pytest.fixture(scope="session")
def metadata_class() -> type:
    """What the tree keeps a step's metadata in."""
    own = (c for c in vars(MODULE).values() if getattr(c, "__module__", "") == MODULE.__name__)
    (found,) = (c for c in own if "track_conv_indices" in getattr(c, "__annotations__", ()))
    return found


@pytest.fixture(scope="session")
def build_rig(subject: type, metadata_class: type) -> Callable[..., probe.Rig]:
    """A rig in a form of draft-extend, with the tree's own metadata."""

    def build(form: str, **options: Any) -> probe.Rig:
        rig = probe.Rig(subject, **options)
        rig.backend.sconv_metadata = metadata_class()
        rig.backend._inkling_sconv_exempt_draft_extend = form == "exempt"
        return rig

    return build


@pytest.fixture(params=("exempt", "inert"))
def form(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_rig(build_rig: Callable[..., probe.Rig], form: str) -> Callable[..., probe.Rig]:
    return functools.partial(build_rig, form)
