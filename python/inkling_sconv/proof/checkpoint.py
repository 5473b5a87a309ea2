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
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from inkling_sconv.proof.architecture import END_OF_TEXT, OptionError, list_shapes, make_config
from inkling_sconv.proof.tokenizer import make_tokenizer, make_tokenizer_config
from inkling_sconv.proof.weights import draw_weights, make_generator

MAX_BYTES = 64_000_000
"""What a checkpoint may weigh: it travels to GPU boxes and into CI caches."""


def write_checkpoint(
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
    config = make_config(layers, mtp_heads, local_layers, moe)
    shapes = dict(list_shapes(config))
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
        _dump(partial / "tokenizer.json", make_tokenizer())
        _dump(partial / "tokenizer_config.json", make_tokenizer_config())
        save_file(
            dict(draw_weights(config, shapes, seed)),
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
    source = make_generator(seed, f"kl prompts {prompt_tokens} {samples}")
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
        write_checkpoint(**options)
        if kl_prompts:
            print(write_kl_prompts(str(out), seed=options["seed"]))
    except (OptionError, OSError) as error:
        print(f"inkling-sconv tiny: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
