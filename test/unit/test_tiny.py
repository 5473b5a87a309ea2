"""The tiny checkpoint: its bytes, how SGLang reads it, and what its draft is worth."""

import copy
import hashlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import emulator
import pytest
import read_checkpoint
import releases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inkling_sconv.proof import checkpoint, weights
from inkling_sconv.proof.architecture import (
    CONTEXT,
    END_OF_TEXT,
    HIDDEN,
    VOCABULARY,
    OptionError,
    list_shapes,
    make_config,
)
from safetensors.torch import load_file

FILES = (
    *("config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json"),
)
WEIGHTS = "241a6e866920a5bb67c0dee7afdf4813d135cb2cbd15025ab387b3e6db9bcbe4"


@pytest.fixture(autouse=True)
def use_one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Checkpoints by options, each written once."""
    folder, known = tmp_path_factory.mktemp("tiny"), {}

    def make(**options: Any) -> Path:
        key = json.dumps(options, sort_keys=True)
        if key not in known:
            known[key] = folder / str(len(known))
            checkpoint.write_checkpoint(known[key], **options)
        return known[key]

    return make


def load(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_the_same_seed_gives_the_same_bytes_in_another_process(make, tmp_path):
    environment = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "2"}
    environment["PYTHONPATH"] = str(releases.ROOT / "python")
    # An empty directory is filled.
    command = [sys.executable, "-m", "inkling_sconv.tiny", str(tmp_path), "--moe"]
    subprocess.run(command, env=environment, check=True)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == sorted(FILES)
    assert sum(file.stat().st_size for file in files) < 80_000_000
    for file in files:
        assert file.read_bytes() == (make(moe=True) / file.name).read_bytes(), file.name
        assert stat.S_IMODE(file.stat().st_mode) & 0o444 == 0o444, file.name


def test_the_weights_are_those_that_the_evidence_was_made_with(make):
    total = hashlib.sha256()
    for name, tensor in sorted(load(make()).items()):
        total.update(name.encode() + tensor.view(torch.int16).numpy().tobytes())
    assert total.hexdigest() == WEIGHTS


def test_an_option_moves_no_weight_that_it_does_not_concern(make):
    four, five, seeded = (load(make(**o)) for o in ({}, {"layers": 5}, {"seed": 1}))
    assert four.keys() < five.keys()
    assert all(torch.equal(four[name], five[name]) for name in four)
    fixed = {name for name in four if torch.equal(four[name], seeded[name])}
    assert all(n.endswith(("global_scale", ".embed_norm.weight")) for n in fixed)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "OUT"),
        ("OUT --layers x", "layers"),
        ("OUT --layers 40", "80 MB"),
        ("OUT --mtp-heads 0", "1 to 8"),
        ("OUT --local-layers 0,4", "0 to 3"),
        ("OUT --local-layers a", "'a' is not a list such as 0,2"),
        ("OUT --local-layers 0,1,2,3", "full attention"),
        ("OUT --seed 1.5", "seed"),
        ("OUT --heads 3", "--heads"),
        ("FULL", "not an empty directory"),
        ("FILE", "not an empty directory"),
        ("FILE/below", "FILE"),
    ],
)
def test_bad_options_give_one_line(arguments, says, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FULL").mkdir()
    for file in ("FULL/mine", "FILE"):
        (tmp_path / file).write_text("keep")
    before = sorted(map(str, tmp_path.rglob("*")))
    assert checkpoint.main(arguments.split()) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err, err
    assert sorted(map(str, tmp_path.rglob("*"))) == before
    assert (tmp_path / "FULL" / "mine").read_text() == "keep"


@settings(deadline=None)
@given(
    layers=st.integers(-1, 9),
    mtp_heads=st.integers(-1, 9),
    local_layers=st.lists(st.integers(-1, 9), max_size=5),
    moe=st.booleans(),
)
def test_any_options_are_refused_or_followed(layers, mtp_heads, local_layers, moe):
    local = set(local_layers)
    legal = layers >= 2 and 1 <= mtp_heads <= 8 and 0 < len(local) == len(local_layers)
    legal = legal and local <= {*range(layers)} and not local.issuperset(range(layers - moe))
    if not legal:
        with pytest.raises(OptionError, match=r"^.+\Z"):
            make_config(layers, mtp_heads, local_layers, moe)
        return
    config = make_config(layers, mtp_heads, local_layers, moe)
    text = config["text_config"]
    assert text["num_hidden_layers"] == layers
    assert text["num_nextn_predict_layers"] == mtp_heads
    assert text["mtp_local_layer_ids"] == list(range(mtp_heads - 1))
    assert text["local_layer_ids"] == sorted(local_layers)
    assert text["dense_mlp_idx"] == layers - moe
    assert weights.find_carrier(text) not in local_layers
    assert len(dict(list_shapes(config))) == len(list(list_shapes(config)))


@pytest.mark.parametrize("exists", [False, True])
def test_an_interrupted_write_leaves_nothing(exists, tmp_path, monkeypatch):
    def save(tensors: Any, path: Path, **_: Any) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_file", save)
    out = tmp_path / "parent" / "out"
    if exists:
        out.mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.write_checkpoint(out)
    assert sorted(tmp_path.rglob("*")) == [out.parent, *([out] if exists else [])]


@pytest.mark.parametrize("tree", ["0.5.17", "0.5.23"])
def test_sglang_reads_every_tensor_once(tree, make, tmp_path):
    folders = (make(), make(moe=True))
    variables = {"XDG_CACHE_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, read_checkpoint.__file__, *map(str, folders)],
        env=releases.environment(releases.release(tree), tree, **variables),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    for folder in folders:
        used = set()
        for part, found in report["models"][str(folder)].items():
            used |= set(found.pop("used"))
            assert found == {
                "class": "InklingForConditionalGeneration" + ("" if part == "target" else "MTP"),
                "config": "InklingMMConfig",
                "dtype": "torch.bfloat16",
                "context": CONTEXT,
                "end": [END_OF_TEXT],
                # So SGLang asks for a tokenizer and for no processor.
                "multimodal": False,
                # Every element of every parameter is written.
                "nan": [],
            }
        assert used == set(load_file(folder / "model.safetensors"))

    assert report["tokenizer"].pop("largest") < END_OF_TEXT
    assert report["tokenizer"] == {
        "size": VOCABULARY,
        "end": END_OF_TEXT,
        "comma": [ord(",")],
        "text": read_checkpoint.TEXT,
    }
    kl = report["kl"]
    assert kl["folder"].endswith({"0.5.17": ".longbench_cache", "0.5.23": "sglang/longbench"}[tree])
    for name, count, shortest, longest in (("default", 48, 1500, 4500), ("few", 5, 100, 300)):
        found = kl[name]
        assert found[0] == count and shortest <= found[1] < found[2] <= longest
    assert kl["largest"] < END_OF_TEXT


@pytest.fixture(scope="module")
def tokenizer(make) -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    return tokenizers.Tokenizer.from_file(str(make() / "tokenizer.json"))


@given(text=st.text())
@settings(deadline=None)
def test_text_round_trips(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(index < VOCABULARY for index in ids)


def test_every_id_has_a_token(tokenizer):
    assert tokenizer.get_vocab_size() == VOCABULARY
    assert len({tokenizer.id_to_token(index) for index in range(VOCABULARY)}) == VOCABULARY
    assert tokenizer.encode("<|endoftext|>").ids == [END_OF_TEXT]


def test_kl_prompts_are_the_same_each_time_and_refuse_nonsense(tmp_path):
    one, other = (
        checkpoint.write_kl_prompts("a/b", samples=3, cache=tmp_path / name) for name in ("x", "y")
    )
    assert one.read_bytes() == other.read_bytes()
    assert list(one.parent.iterdir()) == [one] and one.name == "input_ids_a_b_3000_3.json"
    for options in ({"samples": 0}, {"prompt_tokens": 1}):
        with pytest.raises(OptionError):
            checkpoint.write_kl_prompts("a/b", cache=tmp_path, **options)


def draw_prompt(length: int, seed: int = 0) -> list[int]:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, END_OF_TEXT, (length,), generator=source).tolist()


@pytest.fixture(scope="module")
def model(make) -> emulator.Model:
    return emulator.Model(make())


def test_the_emulator_agrees_with_transformers(make, model):
    """Target and both heads against the implementation that the model's makers published."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("transformers.models.inkling")
    from transformers.modeling_layers import MtpModel

    config = transformers.InklingConfig.from_pretrained(make())
    # The checkpoint has no towers; make them small.
    config.vision_config.num_hidden_layers = 2
    config.vision_config.hidden_size = 16
    config.vision_config.patch_size = 4
    config.vision_config.text_hidden_size = config.audio_config.text_hidden_size = HIDDEN
    # It gives heads with a window the target's window. 60 tokens fit into either.
    config.text_config.mtp_local_layer_ids = []
    theirs = transformers.InklingForConditionalGeneration.from_pretrained(
        make(), config=config, dtype=torch.bfloat16, attn_implementation="eager"
    )
    # Longer than the window of the local layers.
    tokens = draw_prompt(600)
    logits = model.logits(model.target(tokens, [emulator.State() for _ in model.layers], 0))
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([tokens])).logits[0].float()
    assert (logits - expected).abs().max() < 0.3
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() > 0.95

    heads = MtpModel.from_pretrained(theirs)
    # They leave out the embedding's norm here; SGLang does not.
    heads.embed_tokens = theirs.get_input_embeddings()
    request = emulator.Request(model)
    request.prefill(tokens[:60])
    with torch.no_grad():
        hidden = theirs.model(input_ids=torch.tensor([tokens[:60]])).last_hidden_state
        shifted = torch.tensor([[*tokens[1:60], request.bonus]])
        drafts = heads(shifted, hidden, None, torch.arange(60)[None], None)[0]
    assert drafts[0].tolist() == request.drafts


@pytest.mark.parametrize("options", [{}, {"moe": True}], ids=str)
def test_the_draft_is_worth_something(options, make, record_property):
    model, accepted = emulator.Model(make(**options)), {}
    for name, fix, zero in (
        ("default", True, False),
        ("no boundary fix", False, False),
        ("no boundary fix, draft conv zeroed", False, True),
    ):
        request = emulator.Request(model, boundary_fix=fix)
        request.prefill(draw_prompt(100))
        tokens, lens = request.run(150, zero_draft=zero)
        assert len(set(tokens[:150])) >= 100, name
        accepted[name] = sum(lens) / len(lens)
    record_property("table", f"{options} accept length: {accepted}")
    assert accepted["default"] > 2.5 and accepted["no boundary fix"] > 2.5
    assert accepted["no boundary fix, draft conv zeroed"] < 1.5


def test_a_wrong_draft_checkpoint_shows_right_after_a_prefix_hit(model, record_property):
    """With the boundary fix, drafting reads conv windows from the pool after a hit, not later."""
    for rows in (1, 2):
        kept, zeroed = [], []
        for seed in range(10):
            cached = emulator.Request(model)
            tokens = draw_prompt(64 + rows, seed)
            cached.prefill(tokens, keep=64)
            for lens in (kept, zeroed):
                request = copy.deepcopy(cached)
                if lens is zeroed:
                    request.zero_draft_conv()
                request.prefill(tokens[64:])
                lens.append(len(request.step()))
        figures = f"kept {sum(kept) / len(kept):.2f}, zeroed {sum(zeroed) / len(zeroed):.2f}"
        record_property("table", f"first accept length, {rows} tokens after a hit: {figures}")
        assert sum(kept) > sum(zeroed) + 0.7 * len(kept)


def test_one_wrong_row_in_any_conv_window_shows(model):
    tokens, following = draw_prompt(60), draw_prompt(1, 1)
    states = [emulator.State() for _ in model.layers]
    model.target(tokens, states, 0)
    for state in states:
        state.commit(60)

    def compute_logprobs(layer: int | None = None, stream: str = "") -> torch.Tensor:
        copies = copy.deepcopy(states)
        if layer is not None:
            window = copies[layer].conv[stream].clone()
            window[0] = window[0].roll(1)
            copies[layer].conv[stream] = window
        return model.logits(model.target(following, copies, 60)).log_softmax(-1)

    right = compute_logprobs()
    for layer, state in enumerate(states):
        for stream in state.conv:
            wrong = compute_logprobs(layer, stream)
            assert (wrong != right).float().mean() > 0.9, (layer, stream)
