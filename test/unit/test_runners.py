"""What SGLang's runners do with track fields, asked by running them; on every release."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import releases
import torch
from inkling_sconv.probe import runners
from test_fixes import HARMS


@pytest.mark.parametrize("tree", releases.TREES)
def test_every_question_on_every_release(drive, tree):
    seen = drive(tree, "questions")
    assert [name for name, harm in seen["harms"].items() if harm] == HARMS[tree]
    assert seen["again"] and seen["left"] == []
    # Without speculation, tracking was always there: a question that says no to all is void.
    assert seen["tracks"] == [True, tree != "0.5.17"]


def test_what_a_method_raises_is_raised(monkeypatch):
    class Runner:
        def _is_mamba_track_enabled(self):
            raise LookupError("a fork of it")

        def get_forward_batch(self, size):
            return SimpleNamespace(mamba_track_indices=self.buffers.nothing.of_the_kind[size].x)

    module = SimpleNamespace(
        PrefillCudaGraphRunner=Runner, MultiLayerEagleDraftExtendCudaGraphRunner=Runner
    )
    with pytest.raises(LookupError, match="a fork of it"):
        runners.tracks_conv_windows(module, speculative=True)
    # What a runner reads elsewhere is blank, so it can be driven whatever else it holds.
    assert runners.drops_draft_checkpoints(module) is False
    with pytest.raises(AttributeError):
        runners.misplaces_draft_checkpoints(module)


def get_exec():
    return "theirs"


def test_configurations_are_put_back(monkeypatch):
    def asks(self):
        return get_exec().mamba.on and not get_exec().disable_cache

    class Runner:
        _is_mamba_track_enabled = asks

    module = SimpleNamespace(PrefillCudaGraphRunner=Runner, get_exec=get_exec)
    monkeypatch.setattr(get_exec, "__module__", runners.CONFIG_MODULES[0])
    with runners._configured(module, "ours"):
        assert module.get_exec() == "ours"
    assert module.get_exec is get_exec
    with pytest.raises(LookupError), runners._configured(module, "ours"):
        raise LookupError
    assert module.get_exec is get_exec


def test_what_is_blank_is_false_smaller_and_larger():
    blank = runners._Blank()
    assert not blank and not blank.a.b(3)[2].c
    assert not any((blank < 1, blank > 1, blank <= 1, blank >= 1))
    with pytest.raises(AttributeError):
        blank.__deepcopy__  # noqa: B018


@pytest.mark.parametrize(
    ("front", "shift", "wrong"),
    ((True, 0, False), (True, -1, True), (False, 0, True)),
)
def test_a_window_that_is_right_without_front_rows_only_is_wrong(front, shift, wrong):
    """A method that ends ``shift`` rows off the boundary, or that takes front rows for tokens."""

    class ShortConvolution:
        def _update_sconv_cache_for_draft_extend(self, batch, cache, indices, rows):
            skipped = batch.spec_info.num_front_tokens if front else 0
            tokens = torch.cat([cache[0], rows[skipped:]])
            cache[1] = tokens[2 + shift :][:3]

    module = SimpleNamespace(ShortConvolution=ShortConvolution, fused_draft_extend_sconv_cache=None)
    assert runners.misplaces_draft_checkpoints(module) is wrong
    assert module.fused_draft_extend_sconv_cache is None
