"""The tiny checkpoint: its bytes, how SGLang reads it, and what its draft is worth."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import emulator
import pytest
import read_checkpoint
import releases
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inkling_sconv.proof import checkpoint
from safetensors.torch import load_file

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
WEIGHTS = "241a6e866920a5bb67c0dee7afdf4813d135cb2cbd15025ab387b3e6db9bcbe4"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Checkpoints by options, each written once."""
    folder, known = tmp_path_factory.mktemp("tiny"), {}

    def get(**options: Any) -> Path:
        key = json.dumps(options, sort_keys=True)
        if key not in known:
            known[key] = folder / str(len(known))
            checkpoint.write_checkpoint(known[key], **options)
        return known[key]

    return get


def digest(checkpoint: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(checkpoint.iterdir()):
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()


# The bytes.


def test_the_same_seed_gives_the_same_bytes_in_another_process(made, tmp_path):
    for run, options in enumerate(([], ["--moe"])):
        out = tmp_path / str(run)
        environment = {**os.environ, "PYTHONHASHSEED": str(run), "OMP_NUM_THREADS": str(run + 1)}
        environment["PYTHONPATH"] = str(Path(checkpoint.__file__).parent.parent)
        command = [sys.executable, "-m", "inkling_sconv.tiny", str(out), *options]
        subprocess.run(command, env=environment, check=True)
        assert digest(out) == digest(made(moe=True) if options else made())


def test_another_seed_gives_other_weights(made):
    one, other = (load_file(made(**o) / "model.safetensors") for o in ({}, {"seed": 1}))
    assert one.keys() == other.keys()
    fixed = {name for name in one if torch.equal(one[name], other[name])}
    assert all(n.endswith(("global_scale", ".embed_norm.weight")) for n in fixed)


def test_the_weights_are_those_that_the_evidence_was_made_with(made):
    total = hashlib.sha256()
    for name, tensor in sorted(load_file(made() / "model.safetensors").items()):
        total.update(name.encode() + tensor.view(torch.int16).numpy().tobytes())
    assert total.hexdigest() == WEIGHTS


def test_an_option_moves_no_weight_that_it_does_not_concern(made):
    four, five = (load_file(made(**o) / "model.safetensors") for o in ({}, {"layers": 5}))
    assert four.keys() < five.keys()
    assert all(torch.equal(four[name], five[name]) for name in four)


def test_weights_are_of_natural_size(made):
    """Each matrix within a factor of ten of 1/sqrt(fan-in), norms near 1, no tap that vanishes."""
    for name, tensor in load_file(made() / "model.safetensors").items():
        assert tensor.dtype is torch.bfloat16
        tensor = tensor.float()
        assert tensor.isfinite().all(), name
        if name.endswith(("norm.weight", "global_scale")):
            assert ((tensor - 1).abs() < 0.2).all(), name
        elif name.endswith("sconv.weight"):
            assert 0.4 < tensor.std() < 0.6, name
        elif name != "model.llm.embed.weight":
            assert 0.09 < tensor.std() * tensor.shape[-1] ** 0.5 < 100, name


@pytest.mark.parametrize("options", [{}, {"moe": True}, {"layers": 6, "mtp_heads": 4}])
def test_small_whole_and_quick(options, tmp_path):
    seconds = []
    for run in range(3):
        start = time.perf_counter()
        checkpoint.write_checkpoint(tmp_path / str(run), **options)
        seconds.append(time.perf_counter() - start)
        assert {path.name for path in (tmp_path / str(run)).iterdir()} == FILES
        assert sum(path.stat().st_size for path in (tmp_path / str(run)).iterdir()) < 64_000_000
        assert all(path.stat().st_mode & 0o444 == 0o444 for path in (tmp_path / str(run)).iterdir())
    assert min(seconds) < 2


# Bad options, and nothing by halves.


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "OUT"),
        (["OUT", "--layers", "1"], "at least 2"),
        (["OUT", "--layers", "x"], "layers"),
        (["OUT", "--layers", "40"], "64 MB"),
        (["OUT", "--mtp-heads", "0"], "1 to 8"),
        (["OUT", "--mtp-heads", "9"], "1 to 8"),
        (["OUT", "--local-layers", "0,4"], "0 to 3"),
        (["OUT", "--local-layers", "-1"], "0 to 3"),
        (["OUT", "--local-layers", ""], "at least one"),
        (["OUT", "--local-layers", "0,0"], "twice"),
        (["OUT", "--local-layers", "a"], "local-layers"),
        (["OUT", "--local-layers", "0,1,2,3"], "full attention"),
        (["OUT", "--local-layers", "0,1,2", "--moe"], "dense layer with full attention"),
        (["OUT", "--seed", "1.5"], "seed"),
        (["OUT", "--heads", "3"], "--heads"),
        (["FULL"], "not an empty directory"),
        (["FILE"], "not an empty directory"),
        (["FILE/below"], "FILE"),
    ],
)
def test_bad_options_give_one_line(arguments, says, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FULL").mkdir()
    (tmp_path / "FULL" / "mine").write_text("keep")
    (tmp_path / "FILE").write_text("keep")
    before = sorted(map(str, tmp_path.rglob("*")))
    assert checkpoint.main(arguments) == 1
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err, err
    assert sorted(map(str, tmp_path.rglob("*"))) == before
    assert (tmp_path / "FULL" / "mine").read_text() == "keep"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    layers=st.integers(-1, 9),
    mtp_heads=st.integers(-1, 9),
    local_layers=st.lists(st.integers(-1, 9), max_size=5),
    moe=st.booleans(),
)
def test_any_options_are_refused_or_followed(tmp_path_factory, monkeypatch, **options):
    monkeypatch.setattr(tiny, "_weights", lambda *_: [])
    out = tmp_path_factory.mktemp("any") / "out"
    try:
        checkpoint.write_checkpoint(out, **options)
    except checkpoint.OptionError as error:
        assert "\n" not in str(error) and not out.exists()
        return
    text = json.loads((out / "config.json").read_text())["text_config"]
    assert text["num_hidden_layers"] == options["layers"]
    assert text["num_nextn_predict_layers"] == options["mtp_heads"]
    assert text["local_layer_ids"] == sorted(options["local_layers"])
    assert text["dense_mlp_idx"] == options["layers"] - options["moe"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full"), MemoryError])
@pytest.mark.parametrize("exists", [False, True])
def test_an_interrupted_write_leaves_nothing(error, exists, tmp_path, monkeypatch):
    def save(tensors: Any, path: Path, **_: Any) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(tiny, "save_file", save)
    out = tmp_path / "parent" / "out"
    if exists:
        out.mkdir(parents=True)
    with pytest.raises(error if isinstance(error, type) else type(error)):
        checkpoint.write_checkpoint(out)
    assert list(out.parent.iterdir()) == ([out] if exists else [])
    assert not exists or not any(out.iterdir())


def test_an_empty_directory_is_filled(tmp_path):
    checkpoint.write_checkpoint(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES


# How SGLang reads it.


@pytest.mark.parametrize("tree", ["0.5.17", "0.5.23"])
def test_sglang_reads_every_tensor_once(tree, made, tmp_path):
    checkpoints = {"dense": made(), "moe": made(moe=True)}
    environment = releases.environment(
        releases.release(tree), tree, XDG_CACHE_HOME=str(tmp_path), HF_HUB_OFFLINE="1"
    )
    environment["PYTHONPATH"] += os.pathsep + str(Path(checkpoint.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, read_checkpoint.__file__, *map(str, checkpoints.values())],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])

    for kind, checkpoint in checkpoints.items():
        names, used = set(load_file(checkpoint / "model.safetensors")), set()
        for part, found in report["models"][str(checkpoint)].items():
            wanted = "InklingForConditionalGeneration" + ("" if part == "target" else "MTP")
            assert found["class"] == wanted
            assert found["config"] == "InklingMMConfig"
            assert found["dtype"] == "torch.bfloat16"
            assert found["context"] == checkpoint.CONTEXT
            assert found["end"] == [checkpoint.END_OF_TEXT]
            # So SGLang asks for a tokenizer and for no processor.
            assert not found["multimodal"]
            # Every element of every parameter is written, by one tensor.
            assert found["nan"] == [] and found["wrong"] == {}, (kind, part)
            used |= set(found["used"])
        assert used == names

    assert report["tokenizer"] == {
        "size": checkpoint.VOCABULARY,
        "end": checkpoint.END_OF_TEXT,
        "comma": [ord(",")],
        "text": read_checkpoint.TEXT,
        "largest": report["tokenizer"]["largest"],
    }
    assert report["tokenizer"]["largest"] < checkpoint.END_OF_TEXT
    kl = report["kl"]
    assert kl["folder"].endswith({"0.5.17": ".longbench_cache", "0.5.23": "sglang/longbench"}[tree])
    assert kl["default"][0] == 48 and 1500 <= kl["default"][1] < kl["default"][2] <= 4500
    assert kl["few"][0] == 5 and 100 <= kl["few"][1] < kl["few"][2] <= 300
    assert kl["largest"] < checkpoint.END_OF_TEXT


@given(text=st.text())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_text_round_trips(made, text):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(made() / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(index < checkpoint.VOCABULARY for index in ids)


def test_every_id_has_a_token(made):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(made() / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == checkpoint.VOCABULARY
    assert len({tokenizer.id_to_token(index) for index in range(checkpoint.VOCABULARY)}) == 2048
    assert tokenizer.encode("<|endoftext|>").ids == [checkpoint.END_OF_TEXT]


def test_kl_prompts_are_the_same_each_time_and_refuse_nonsense(tmp_path):
    one, other = (
        checkpoint.write_kl_prompts("a/b", samples=3, cache=tmp_path / name).read_bytes()
        for name in ("x", "y")
    )
    assert one == other
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["input_ids_a_b_3000_3.json"]
    for options in ({"samples": 0}, {"prompt_tokens": 1}):
        with pytest.raises(checkpoint.OptionError):
            checkpoint.write_kl_prompts("a/b", cache=tmp_path, **options)


# What it says, and what its draft is worth, on the emulator.


def prompt(length: int, seed: int = 0) -> list[int]:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, checkpoint.END_OF_TEXT, (length,), generator=source).tolist()


def test_the_emulator_agrees_with_transformers(made):
    """Target and both heads against the implementation that the model's makers published."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("transformers.models.inkling")
    from transformers.modeling_layers import MtpModel

    folder = made()
    config = transformers.InklingConfig.from_pretrained(folder)
    # The towers are not in the checkpoint; make them small.
    config.vision_config.num_hidden_layers = 2
    config.vision_config.hidden_size = 16
    config.vision_config.patch_size = 4
    config.vision_config.text_hidden_size = config.audio_config.text_hidden_size = checkpoint.HIDDEN
    theirs = transformers.InklingForConditionalGeneration.from_pretrained(
        folder, config=config, dtype=torch.bfloat16, attn_implementation="eager"
    )
    # Longer than the window of the local layers.
    tokens = prompt(600)
    ours = emulator.Model(folder)
    logits = ours.logits(ours.target(tokens, [emulator.State() for _ in ours.layers], 0))
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([tokens])).logits[0].float()
    assert (logits - expected).abs().max() < 0.3
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() > 0.95

    heads = MtpModel.from_pretrained(theirs)
    # They leave out the embedding's norm here; SGLang does not.
    heads.embed_tokens = theirs.get_input_embeddings()
    request = emulator.Request(ours)
    request.prefill(tokens[:60])
    ids, hidden = torch.tensor([tokens[:60]]), None
    with torch.no_grad():
        hidden = theirs.model(input_ids=ids).last_hidden_state
        shifted = torch.tensor([[*tokens[1:60], request.bonus]])
        drafts = heads(shifted, hidden, None, torch.arange(60)[None], None)[0]
    assert drafts[0].tolist() == request.drafts


@pytest.mark.parametrize("options", [{}, {"moe": True}], ids=str)
def test_the_draft_is_worth_something(options, made, record_property):
    model = emulator.Model(made(**options))
    runs = {}
    for name, fix, zero in (
        ("default", True, False),
        ("no boundary fix", False, False),
        ("no boundary fix, draft conv zeroed", False, True),
    ):
        request = emulator.Request(model, boundary_fix=fix)
        request.prefill(prompt(100))
        runs[name] = request.run(300, zero_draft=zero)
    record_property(
        "table",
        "\n".join(
            f"{options} {name:35} accept length {run.accept_length:.2f}, "
            f"{len(set(run.tokens[:300]))} distinct tokens of 300"
            for name, run in runs.items()
        ),
    )
    assert all(len(set(run.tokens[:300])) >= 100 for run in runs.values())
    assert runs["default"].accept_length > 2.5
    assert runs["no boundary fix"].accept_length > 2.5
    assert runs["no boundary fix, draft conv zeroed"].accept_length < 1.5


def test_a_wrong_draft_checkpoint_shows_right_after_a_prefix_hit(made, record_property):
    """With the boundary fix, drafting reads conv windows from the pool after a hit, not later.

    A head's row holds the token after it, so the window of a checkpoint is right for a prompt that
    goes on like the one that made it, and not quite for one that branches off there.
    """
    model = emulator.Model(made())
    table, hits = [], {}
    for rows in (1, 2, 3):
        lens: dict[str, list[int]] = {"kept": [], "zeroed": [], "branch": []}
        for seed in range(10):
            cached = emulator.Request(model)
            tokens = prompt(64 + rows, seed)
            cached.prefill(tokens, keep=64)
            for name, first in lens.items():
                request = copy.deepcopy(cached)
                if name == "zeroed":
                    request.zero_draft_conv()
                request.prefill(prompt(rows, 100 + seed) if name == "branch" else tokens[64:])
                first.append(len(request.step()))
        hits[rows] = {name: sum(first) / len(first) for name, first in lens.items()}
        figures = ", ".join(f"{name} {mean:.2f}" for name, mean in hits[rows].items())
        table.append(f"first accept length, {rows} tokens after a hit: {figures}")
    record_property("table", "\n".join(table))
    for rows in (1, 2):
        assert hits[rows]["kept"] > hits[rows]["zeroed"] + 0.7


def test_one_wrong_row_in_any_conv_window_shows(made):
    model = emulator.Model(made())
    tokens, following = prompt(60), prompt(1, 1)
    states = [emulator.State() for _ in model.layers]
    model.target(tokens, states, 0)
    for state in states:
        state.commit(60)

    def logprobs(layer: int | None = None, stream: str = "") -> torch.Tensor:
        copies = copy.deepcopy(states)
        if layer is not None:
            window = copies[layer].conv[stream].clone()
            window[0] = window[0].roll(1)
            copies[layer].conv[stream] = window
        hidden = model.target(following, copies, 60)
        return model.logits(hidden).log_softmax(-1)

    right = logprobs()
    for layer, state in enumerate(states):
        for stream in state.conv:
            assert (logprobs(layer, stream) != right).float().mean() > 0.9, (layer, stream)
