"""The contract, run inside a process that has one SGLang tree and our plugin.

``subject`` is the backend class that SGLang ends up with. ``test/contract/mutants.py`` puts another
class in its place.
"""

from __future__ import annotations

import importlib

import pytest
from hypothesis import Phase, settings
from inkling_sconv import plugin, probe
from sglang.srt.plugins import load_plugins

settings.register_profile("contract", max_examples=150, deadline=None, derandomize=True)
# A mutant only has to be caught: no need to shrink what caught it.
settings.register_profile(
    "mutants", settings.get_profile("contract"), max_examples=60, phases=[Phase.generate]
)
settings.load_profile("contract")

load_plugins()
MODULE = importlib.import_module(plugin.BACKEND_MODULE)


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> type:
    mutant = getattr(request.config, "mutant_class", None)
    return mutant or probe.find_backends(MODULE)[0]


@pytest.fixture
def make_rig(subject: type):
    def make(**options) -> probe.Rig:
        return probe.Rig(subject, **options)

    return make
