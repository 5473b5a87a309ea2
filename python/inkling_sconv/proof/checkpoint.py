"""Make a tiny Inkling checkpoint with MTP heads, in a second and without a download.

``python -m inkling_sconv.tiny OUT`` writes a directory for ``sglang.launch_server --model-path``:
``config.json``, ``generation_config.json``, ``model.safetensors`` with the tensor names of the
released checkpoints, and a byte-level tokenizer. It has no vision or audio weights. SGLang leaves
those towers out unless ``--enable-multimodal`` is given.

The weights are random, not trained. They are arranged so that the short convolution decides the
output:

- One layer, the *carrier*, writes most of the residual stream. Its MLP recalls a vector for the
  current token, and its ``mlp_sconv`` mixes the vectors of the last four tokens. So the next token
  is a fixed function of the last four, as erratic as a hash, and greedy output does not loop.
- The other layers add a little, like the layers of a deep model. Attention, the KV cache and every
  other convolution change all logprobs, and seldom change the most probable token.
- The block of each MTP head is a copy of the carrier, fed with the embedding of the next token. It
  predicts the target's token if its convolution window is right, and almost never if it is wrong.

With two draft steps, the emulator in ``test/unit/test_tiny.py`` measures an accept length of 2.7 of
3, bonus token included (1.3 with the draft's conv windows zeroed before each step). By default
SGLang reads those windows only right after a prefix hit. docs/evidence.md has a server's figures.
"""

import argparse
import importlib
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from inkling_sconv.errors import give_reason, make_line
from inkling_sconv.proof.architecture import END_OF_TEXT, OptionError, list_shapes, make_config
from inkling_sconv.proof.tokenizer import make_tokenizer, make_tokenizer_config
from inkling_sconv.proof.weights import draw_weights, make_generator
from inkling_sconv.trees.folder import write_output

MAX_BYTES = 80_000_000
"""Upper bound of a checkpoint's size in bytes: it is copied to GPU machines and CI caches."""


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
        out: the directory. It is made with its parents, and may exist if it is empty.
        layers: number of decoder layers, each of hidden size 512, bf16.
        mtp_heads: number of MTP heads, each a dense block. The last one has full attention, the
            others a window of 1024 tokens.
        local_layers: ids of the layers with a sliding window of 512 tokens. The other layers have
            full attention.
        moe: give the last layer 8 routed experts (2 per token) and a shared one.
        seed: seed of every weight. The same options and seed give the same bytes.

    Raises:
        OptionError: the options contradict each other, the result would weigh more than
            ``MAX_BYTES``, or ``out`` is a file or a directory that is not empty.
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
        _write_json(partial / "config.json", config)
        _write_json(partial / "generation_config.json", {"eos_token_id": END_OF_TEXT})
        _write_json(partial / "tokenizer.json", make_tokenizer())
        _write_json(partial / "tokenizer_config.json", make_tokenizer_config())
        save_file(
            dict(draw_weights(config, shapes, seed)),
            partial / "model.safetensors",
            metadata={"format": "pt"},
        )
        # mkdtemp and safetensors make files that only their owner can read.
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

    With that file in place the KL helpers download no data set. The file's name has three of their
    arguments in it, so pass the same values here:

    Args:
        model: their ``tokenizer_path`` (``model_name`` of the helpers), character for character.
        prompt_tokens: their ``max_prompt_tokens``. A prompt gets 0.5 to 1.5 times as many tokens.
        samples: their ``num_samples``: 48, unless a test asks for more by ``max_samples``.
        seed: seed of the lengths and the tokens.
        cache: their ``CACHE_DIR``. None reads it from the installed SGLang, which takes about ten
            seconds. Older releases have it inside the package (``sglang/test/.longbench_cache``),
            newer ones in ``~/.cache/sglang/longbench`` (or under ``XDG_CACHE_HOME``).

    Returns:
        The file written: a JSON list of ``samples`` lists of token ids, without end-of-text.

    Raises:
        OptionError: ``prompt_tokens`` or ``samples`` is not positive, or SGLang does not import.
        OSError: the cache cannot be written.
    """
    if prompt_tokens < 2 or samples < 1:
        raise OptionError("prompts need at least 2 tokens each, and there must be at least 1.")
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
    write_output(path, json.dumps(prompts).encode())
    return path


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise OptionError(f"{message}.")


def _parse_layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 0,2") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line: 0, or 2 with one line on stderr if no checkpoint was written."""
    parser = _Parser(prog="inkling-sconv tiny", description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="the directory to write")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--mtp-heads", type=int, default=2)
    parser.add_argument(
        "--local-layers", type=_parse_layers, default=(0, 2), help="comma-separated (default: 0,2)"
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
        print(f"inkling-sconv tiny: {make_line(give_reason(error))}", file=sys.stderr)
        return 2
    return 0
