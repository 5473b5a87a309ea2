"""A small Inkling checkpoint with MTP heads, made in a second, with nothing downloaded.

``python -m inkling_sconv.tiny OUT`` writes a directory that ``sglang.launch_server --model-path``
starts on as it is: ``config.json``, ``generation_config.json``, ``model.safetensors`` under the
names of the released checkpoints, and a byte-level tokenizer. There are no vision and audio
weights; SGLang leaves those towers out unless ``--enable-multimodal`` is given.

The weights are drawn, not trained, and so arranged that the short convolution decides what is said:

- one layer, the *carrier*, writes most of the residual stream: its MLP recalls a vector for the
  token at hand, and its ``mlp_sconv`` mixes those of the last four tokens. So the next token is a
  fixed function of the last four, as erratic as a hash, and greedy output falls into no loop;
- the other layers add a little, like layers of a deep model. Attention, KV cache and every other
  convolution show in all logprobs, and seldom move the most probable token;
- the block of each MTP head is the carrier over again, fed with the embedding of the next token. It
  finds the target's token where its convolution window is right, and hardly ever where it is not.

With two draft steps, ``test/unit/test_tiny.py`` finds an accept length of 2.8 of 3, the bonus token
included, and of 1.3 with the draft's conv windows zeroed before each step. SGLang reads those
windows in every step only under ``SGLANG_ENABLE_MTP_BOUNDARY_KV_FIX=0``. By default it rebuilds
them from the last tokens, and reads them right after a prefix hit: with one token to go, the first
accept length is then 2.5, or 1.3 if they were zero. These figures are of an emulator; those of a
server are in docs/evidence.md.

Values come from integers of a Mersenne twister seeded per tensor, scaled and rounded as IEEE 754
prescribes: the same bytes on every machine, and one option moves no tensor of the others.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import itertools
import json
import math
import os
import shutil
import string
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCABULARY = 2048
END_OF_TEXT = VOCABULARY - 1
HIDDEN = 512
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 128
INTERMEDIATE = 1024
EXPERTS, EXPERTS_PER_TOKEN, SHARED_EXPERTS, EXPERT_INTERMEDIATE = 8, 2, 1, 256
D_REL, REL_EXTENT, WINDOW = 16, 1024, 512
KERNEL = 4
CONTEXT = 32768

MAX_BYTES = 64_000_000
"""What a checkpoint may weigh: it travels to GPU boxes and into CI caches."""

RECALL = 0.6
"""How far the carrier's MLP rows point at embeddings: each at those of two tokens. The unit of the
token at hand then gives about (0.6 * sqrt(512))^2 = 184, all others together about 20, so the
MLP recalls one vector per token pair, and what disturbs its input hardly disturbs its output. At
zero the draft would have to compute its input as exactly as the target does."""

CARRIER_ATTENTION = 0.25
"""Size of the carrier's attention output, as a multiple of what drawn weights give: seen in every
logit, too weak to move the most probable token often."""

BACKGROUND = 0.1
"""The same for attention and MLP of the other layers, which the draft does not have. Their sum is
far above bf16's rounding, so that a wrong state in any of them shows; the target's token still
follows the carrier in most steps."""

DRAFT_HIDDEN = 0.1
"""Share of the target's hidden state in a head's input. It tells of the last token, and the next
one is what counts; at zero, a wrong hidden state would not show."""

CONV_TAP = 0.5
"""Standard deviation of a convolution tap: 1/sqrt(fan-in), with a fan-in of four rows."""

RELATIVE_BIAS = 2.0
"""Standard deviation of the relative bias in attention. With normalised queries and keys at scale
1/head_dim the dot product alone is nearly flat; the bias makes a head look at a few tokens."""

UNEMBED = 4.0
"""Standard deviation of a logit. At 1, 2048 tokens are nearly equally probable, and a draft is
worth nothing as soon as a request samples."""


class OptionError(ValueError):
    """Options that no checkpoint can be made from. The message is one line for the user."""


def write(
    out: Path,
    *,
    layers: int = 4,
    mtp_heads: int = 2,
    local_layers: Sequence[int] = (0, 2),
    moe: bool = False,
    seed: int = 0,
) -> None:
    """Write the checkpoint into the directory ``out``, whole or not at all.

    Args:
        out: made with its parents; may exist if it is empty.
        layers: decoder layers, hidden size 512, bf16.
        mtp_heads: MTP heads, each one dense block with full attention.
        local_layers: ids of the layers with a sliding window of 512 tokens; the others attend to
            everything.
        moe: give the last layer 8 routed experts (2 per token) and a shared one.
        seed: of every weight. The same options and seed give the same bytes.

    Raises:
        OptionError: the options contradict each other, the result would weigh more than
            ``MAX_BYTES``, or ``out`` is a file or a directory with something in it.
        OSError: ``out`` cannot be written.
    """
    config = _config(layers, mtp_heads, local_layers, moe)
    shapes = dict(_shapes(config))
    size = 2 * sum(math.prod(shape) for shape in shapes.values())
    if size > MAX_BYTES:
        raise OptionError(
            f"{layers} layers and {mtp_heads} MTP heads weigh {size / 1e6:.0f} MB, more than "
            f"{MAX_BYTES / 1e6:.0f} MB; ask for fewer."
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OptionError(f"{out} exists and is not an empty directory; name another, or clear it.")

    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        _dump(partial / "config.json", config)
        _dump(partial / "generation_config.json", {"eos_token_id": END_OF_TEXT})
        _dump(partial / "tokenizer.json", _tokenizer())
        _dump(partial / "tokenizer_config.json", _tokenizer_config())
        save_file(
            dict(_weights(config, shapes, seed)),
            partial / "model.safetensors",
            metadata={"format": "pt"},
        )
        # What mkdtemp and safetensors make is for its owner only.
        partial.chmod(0o755)
        (partial / "model.safetensors").chmod(0o644)
        partial.replace(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_kl_prompts(
    model: str,
    *,
    prompt_tokens: int = 3000,
    samples: int = 48,
    seed: int = 0,
    cache: Path | None = None,
) -> Path:
    """Write the prompts that ``sglang.test.kl_test_utils.get_input_ids`` looks for on disk.

    With that file in place the KL helpers load no data set. They find it by its name, which is
    made of their three arguments, so these have to be the same here:

    Args:
        model: their ``tokenizer_path`` (``model_name`` of the helpers), character for character.
        prompt_tokens: their ``max_prompt_tokens``; prompts get 0.5 to 1.5 times as many.
        samples: their ``num_samples``: 48, unless a test asks for more by ``max_samples``.
        seed: of the lengths and the tokens.
        cache: the helpers' ``CACHE_DIR``; None asks the installed SGLang, which imports it
            (about ten seconds). It is ``sglang/test/.longbench_cache`` inside the package in
            older releases, ``~/.cache/sglang/longbench`` (or under ``XDG_CACHE_HOME``) in newer.

    Returns:
        The file written: a JSON list of ``samples`` lists of token ids, end-of-text not among them.

    Raises:
        OptionError: ``prompt_tokens`` or ``samples`` is not positive, or SGLang does not import.
        OSError: the cache cannot be written.
    """
    if prompt_tokens < 2 or samples < 1:
        raise OptionError("prompts need at least 2 tokens, and at least 1 sample.")
    if cache is None:
        try:
            cache = Path(importlib.import_module("sglang.test.kl_test_utils").CACHE_DIR)
        except ImportError as error:
            raise OptionError(f"SGLang's KL helpers do not import: {error}.") from error
    source = _generator(seed, f"kl prompts {prompt_tokens} {samples}")
    low, high = prompt_tokens // 2, prompt_tokens + prompt_tokens // 2
    lengths = torch.randint(low, high + 1, (samples,), generator=source).tolist()
    prompts = [
        torch.randint(0, END_OF_TEXT, (length,), generator=source).tolist() for length in lengths
    ]
    cache.mkdir(parents=True, exist_ok=True)
    name = model.replace("/", "_").replace("\\", "_")
    path = cache / f"input_ids_{name}_{prompt_tokens}_{samples}.json"
    handle, partial = tempfile.mkstemp(prefix=".input_ids.", dir=cache)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(prompts, file)
        # mkstemp's file is for its owner only.
        Path(partial).chmod(0o644)
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    return path


def _config(layers: int, mtp_heads: int, local_layers: Sequence[int], moe: bool) -> dict[str, Any]:
    local = sorted(set(local_layers))
    if layers < 2:
        raise OptionError(f"{layers} layers: at least 2 are needed, one local and one full.")
    if not 1 <= mtp_heads <= 8:
        raise OptionError(f"{mtp_heads} MTP heads: 1 to 8 can be made.")
    if len(local) != len(local_layers):
        raise OptionError(f"local layers {_list(local_layers)} name a layer twice.")
    if not local or not 0 <= local[0] <= local[-1] < layers:
        raise OptionError(
            f"local layers {_list(local_layers)}: name at least one, from 0 to {layers - 1}."
        )
    dense = layers - 1 if moe else layers
    if not set(range(dense)) - set(local):
        raise OptionError(
            f"local layers {_list(local)} leave no {'dense ' if moe else ''}layer with full "
            "attention; the MTP heads need one to follow."
        )
    return {
        "architectures": ["InklingForConditionalGeneration"],
        "model_type": "inkling_mm_model",
        "dtype": "bfloat16",
        "eos_token_id": END_OF_TEXT,
        "mtp_config": {"num_nextn_predict_layers": mtp_heads, "chain_hidden_post_norm": True},
        "text_config": {
            "model_type": "inkling_model",
            "dtype": "bfloat16",
            "eos_token_id": END_OF_TEXT,
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "num_hidden_layers": layers,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "swa_num_attention_heads": HEADS,
            "swa_num_key_value_heads": KV_HEADS,
            "swa_head_dim": HEAD_DIM,
            "sliding_window_size": WINDOW,
            "local_layer_ids": local,
            "d_rel": D_REL,
            "rel_extent": REL_EXTENT,
            "use_sconv": True,
            "sconv_kernel_size": KERNEL,
            "use_embed_norm": True,
            "use_global_scale": True,
            "dense_mlp_idx": dense,
            "dense_intermediate_size": INTERMEDIATE,
            "intermediate_size": EXPERT_INTERMEDIATE,
            "n_routed_experts": EXPERTS if moe else 0,
            "n_shared_experts": SHARED_EXPERTS if moe else 0,
            "num_experts_per_tok": EXPERTS_PER_TOKEN if moe else 1,
            "shared_expert_sink": moe,
            "use_gate_bias": moe,
            "route_scale": 1.0,
            "logits_mup_width_multiplier": 1.0,
            "model_max_length": CONTEXT,
            "num_nextn_predict_layers": mtp_heads,
            "chain_hidden_post_norm": True,
        },
    }


def _list(layers: Sequence[int]) -> str:
    return ",".join(map(str, layers)) or "(none)"


def _carrier(text: dict[str, Any]) -> int:
    """The first dense layer with full attention: an MTP head's block is dense and full."""
    dense = range(text["dense_mlp_idx"])
    return next(layer for layer in dense if layer not in text["local_layer_ids"])


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor's name and shape."""
    text = config["text_config"]
    yield "model.llm.embed.weight", (VOCABULARY, HIDDEN)
    yield "model.llm.embed_norm.weight", (HIDDEN,)
    for layer in range(text["num_hidden_layers"]):
        extent = WINDOW if layer in text["local_layer_ids"] else REL_EXTENT
        dense = layer < text["dense_mlp_idx"]
        yield from _block_shapes(f"model.llm.layers.{layer}.", extent, dense)
    yield "model.llm.norm.weight", (HIDDEN,)
    yield "model.llm.unembed.weight", (VOCABULARY, HIDDEN)
    for head in range(text["num_nextn_predict_layers"]):
        prefix = f"model.mtp.layers.{head}."
        yield f"{prefix}hidden_norm.weight", (HIDDEN,)
        yield f"{prefix}embed_norm.weight", (HIDDEN,)
        yield f"{prefix}input_proj.weight", (HIDDEN, 2 * HIDDEN)
        yield from _block_shapes(f"{prefix}transformer_block.", REL_EXTENT, True)
    yield "model.mtp.chain_norm.weight", (HIDDEN,)


def _block_shapes(
    prefix: str, rel_extent: int, dense: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    yield f"{prefix}attn_norm.weight", (HIDDEN,)
    yield f"{prefix}attn.wq_du.weight", (query, HIDDEN)
    yield f"{prefix}attn.wk_dv.weight", (key, HIDDEN)
    yield f"{prefix}attn.wv_dv.weight", (key, HIDDEN)
    yield f"{prefix}attn.wr_du.weight", (HEADS * D_REL, HIDDEN)
    yield f"{prefix}attn.wo_ud.weight", (HIDDEN, query)
    yield f"{prefix}attn.q_norm.weight", (HEAD_DIM,)
    yield f"{prefix}attn.k_norm.weight", (HEAD_DIM,)
    yield f"{prefix}attn.k_sconv.weight", (key, 1, KERNEL)
    yield f"{prefix}attn.v_sconv.weight", (key, 1, KERNEL)
    yield f"{prefix}attn.rel_logits_proj.proj", (D_REL, rel_extent)
    yield f"{prefix}attn_sconv.weight", (HIDDEN, 1, KERNEL)
    yield f"{prefix}mlp_norm.weight", (HIDDEN,)
    if dense:
        # Rows of gate and up alternate.
        yield f"{prefix}mlp.w13_dn.weight", (2 * INTERMEDIATE, HIDDEN)
        yield f"{prefix}mlp.w2_md.weight", (HIDDEN, INTERMEDIATE)
        yield f"{prefix}mlp.global_scale", (1,)
    else:
        experts, inner = f"{prefix}mlp.experts.", EXPERT_INTERMEDIATE
        shared = f"{prefix}mlp.shared_experts.shared_"
        yield f"{prefix}mlp.gate.weight", (EXPERTS + SHARED_EXPERTS, HIDDEN)
        yield f"{prefix}mlp.gate.bias", (EXPERTS,)
        yield f"{prefix}mlp.gate.global_scale", (1,)
        yield f"{experts}w13_weight", (EXPERTS, 2 * inner, HIDDEN)
        yield f"{experts}w2_weight", (EXPERTS, HIDDEN, inner)
        yield f"{shared}w13_weight", (SHARED_EXPERTS, 2 * inner, HIDDEN)
        yield f"{shared}w2_weight", (SHARED_EXPERTS, HIDDEN, inner)
    yield f"{prefix}mlp_sconv.weight", (HIDDEN, 1, KERNEL)


def _weights(
    config: dict[str, Any], shapes: dict[str, tuple[int, ...]], seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of ``shapes``, bf16."""
    carrier = _carrier(config["text_config"])
    carrier_prefix = f"model.llm.layers.{carrier}."
    followed: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        if ".transformer_block." in name:
            tensor = followed[carrier_prefix + name.partition(".transformer_block.")[2]].clone()
        elif name == "model.mtp.chain_norm.weight":
            tensor = followed["model.llm.norm.weight"].clone()
        else:
            tensor = _tensor(name, shape, seed, carrier)
        if name.startswith((carrier_prefix, "model.llm.embed.", "model.llm.norm.")):
            followed[name] = tensor
        if name == f"{carrier_prefix}mlp.w13_dn.weight":
            _recall(tensor, followed["model.llm.embed.weight"])
        yield name, tensor


def _tensor(name: str, shape: tuple[int, ...], seed: int, carrier: int) -> torch.Tensor:
    """The tensor called ``name``, ``shape``, bf16."""
    if name.endswith("global_scale"):
        return torch.ones(shape, dtype=torch.bfloat16)
    if ".mtp." in name and name.endswith(".embed_norm.weight"):
        # The block is to see the embedding as the carrier does.
        return torch.ones(shape, dtype=torch.bfloat16)
    values = _uniform(seed, name, shape)
    if name.endswith("input_proj.weight"):
        hidden = values[:, :HIDDEN] * (DRAFT_HIDDEN / math.sqrt(HIDDEN))
        values = torch.cat((hidden, torch.eye(HIDDEN)), dim=1)
    elif name.endswith("norm.weight"):
        values = 1 + values / 10
    elif name.endswith("gate.bias"):
        values = values / 10
    else:
        values = values * _std(name, shape, carrier)
    if name == "model.llm.unembed.weight":
        # Greedy output then never ends by itself.
        values[END_OF_TEXT] = 0
    return values.to(torch.bfloat16)


def _recall(rows: torch.Tensor, embeddings: torch.Tensor) -> None:
    """Turn ``rows`` ``[2 * INTERMEDIATE, HIDDEN]``, gate and up alternating, towards the
    ``embeddings`` ``[VOCABULARY, HIDDEN]`` of two tokens per unit."""
    pairs = embeddings.float().view(-1, INTERMEDIATE, HIDDEN).sum(0)
    # The squares of the shares add up to 1: the rows keep their size.
    drawn = rows.float() * math.sqrt(1 - 2 * RECALL**2)
    rows.copy_(drawn + pairs.repeat_interleave(2, dim=0) * (RECALL / math.sqrt(HIDDEN)))


def _std(name: str, shape: tuple[int, ...], carrier: int) -> float:
    if name == "model.llm.embed.weight":
        return 1.0
    if name.endswith("sconv.weight"):
        return CONV_TAP
    if name.endswith("rel_logits_proj.proj"):
        return RELATIVE_BIAS / math.sqrt(D_REL)
    fan_in = shape[-1]
    if name == "model.llm.unembed.weight":
        return UNEMBED / math.sqrt(fan_in)
    if not name.endswith(("wo_ud.weight", "w2_md.weight", "w2_weight")):
        return 1 / math.sqrt(fan_in)
    layer = int(name.removeprefix("model.llm.layers.").partition(".")[0])
    gain = BACKGROUND
    if layer == carrier:
        gain = CARRIER_ATTENTION if name.endswith("wo_ud.weight") else 1.0
    return gain / math.sqrt(fan_in)


def _uniform(seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Uniform values of mean 0 and standard deviation 1, float32."""
    count = math.prod(shape)
    # Four values from each draw of 64 bits: the twister is what takes the time.
    words = torch.empty(-(-count // 4), dtype=torch.int64)
    words.random_(-(2**63), None, generator=_generator(seed, name))
    integers = words.view(torch.int16)[:count].view(shape)
    return integers.to(torch.float32) * (math.sqrt(3) / 2**15)


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))


def _tokenizer() -> dict[str, Any]:
    """A byte-level BPE tokenizer: all text round-trips, all ids decode, some pairs merge."""
    # Bytes that are no printable character are written as code points from 256 on.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    alphabet = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    space, letters = alphabet[ord(" ")], string.ascii_letters
    pairs = itertools.chain(
        itertools.product(space + letters, letters), itertools.product(letters, string.digits)
    )
    merges = [list(pair) for pair in itertools.islice(pairs, VOCABULARY - 1 - len(alphabet))]
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": END_OF_TEXT,
                "content": "<|endoftext|>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }


def _dump(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise OptionError(f"{message}.")


def _layers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a checkpoint as the command line says. Returns 1, with one line on stderr, if not."""
    parser = _Parser(prog="inkling-sconv tiny", description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="the directory to write")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--mtp-heads", type=int, default=2)
    parser.add_argument(
        "--local-layers", type=_layers, default=(0, 2), help="comma-separated (default: 0,2)"
    )
    parser.add_argument("--moe", action="store_true", help="make the last layer a MoE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kl-prompts",
        action="store_true",
        help="also write the prompts that SGLang's KL test helpers look for, for this OUT",
    )
    try:
        options = vars(parser.parse_args(arguments))
        kl_prompts = options.pop("kl_prompts")
        out = options["out"]
        write(**options)
        if kl_prompts:
            print(write_kl_prompts(str(out), seed=options["seed"]))
    except (OptionError, OSError) as error:
        print(f"inkling-sconv tiny: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
