"""The weights of the tiny Inkling: random, but the short convolution decides the output.

``checkpoint.py`` describes the arrangement. Each tensor has a Mersenne twister of its own, whose
integers are scaled and rounded as IEEE 754 prescribes. So every machine gets the same bytes, and an
option changes only the tensors that it is about.
"""

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from inkling_sconv.proof.architecture import D_REL, END_OF_TEXT, HIDDEN, INTERMEDIATE, find_carrier

RECALL = 0.6
"""Weight of two tokens' embeddings in each row of the carrier's MLP. The unit of the current token
then gives about (0.6 * sqrt(512))^2 = 184; all other units together give about 20. So the MLP
recalls one vector per token pair, and noise in its input hardly changes its output."""

CARRIER_ATTENTION = 0.25
"""Scale of the carrier's attention output; random weights give 1. The output changes every logit,
but seldom the most probable token."""

BACKGROUND = 0.1
"""The same for attention and MLP of the other layers, which the draft lacks. Their sum is far above
bf16's rounding error, so a wrong state in any of them shows. In most steps the carrier still
decides the token."""

DRAFT_HIDDEN = 0.1
"""Share of the target's hidden state in a head's input. It is small, because that state belongs to
the last token and the draft depends on the next one. At 0, a wrong state would not show."""

CONV_TAP = 0.5
"""Standard deviation of a convolution tap: 1/sqrt(fan-in), with a fan-in of four rows."""

RELATIVE_BIAS = 2.0
"""Standard deviation of the relative bias in attention. With normalised queries and keys at scale
1/head_dim, the dot product alone is nearly flat. The bias makes a head attend to a few tokens."""

UNEMBED = 4.0
"""Standard deviation of a logit. At 1, all 2048 tokens would be nearly equally probable, and a
request that samples would reject almost every draft."""


def draw_weights(
    config: dict[str, Any], shapes: dict[str, tuple[int, ...]], seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of ``shapes`` with its name: bf16, on the CPU."""
    carrier = find_carrier(config["text_config"])
    carrier_prefix = f"model.llm.layers.{carrier}."
    drawn: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        if ".transformer_block." in name:
            tensor = drawn[carrier_prefix + name.partition(".transformer_block.")[2]].clone()
        elif name == "model.mtp.chain_norm.weight":
            tensor = drawn["model.llm.norm.weight"].clone()
        else:
            tensor = _draw_tensor(name, shape, seed, carrier)
        if name.startswith((carrier_prefix, "model.llm.embed.", "model.llm.norm.")):
            drawn[name] = tensor
        if name == f"{carrier_prefix}mlp.w13_dn.weight":
            _point_at_embeddings(tensor, drawn["model.llm.embed.weight"])
        yield name, tensor


def _draw_tensor(name: str, shape: tuple[int, ...], seed: int, carrier: int) -> torch.Tensor:
    # With a norm of ones, a head's block gets the embedding as the carrier does.
    if name.endswith("global_scale") or (".mtp." in name and name.endswith(".embed_norm.weight")):
        return torch.ones(shape, dtype=torch.bfloat16)
    values = _draw_uniform(seed, name, shape)
    if name.endswith("input_proj.weight"):
        hidden = values[:, :HIDDEN] * (DRAFT_HIDDEN / math.sqrt(HIDDEN))
        values = torch.cat((hidden, torch.eye(HIDDEN)), dim=1)
    elif name.endswith("norm.weight"):
        values = 1 + values / 10
    elif name.endswith("gate.bias"):
        values = values / 10
    else:
        values = values * _choose_std(name, shape, carrier)
    if name == "model.llm.unembed.weight":
        # Greedy output then never ends early.
        values[END_OF_TEXT] = 0
    return values.to(torch.bfloat16)


def _point_at_embeddings(rows: torch.Tensor, embeddings: torch.Tensor) -> None:
    """Turn each unit's rows towards the embeddings of two tokens, by ``RECALL``.

    ``rows`` is ``[2 * INTERMEDIATE, HIDDEN]``, gate and up alternating; ``embeddings`` is
    ``[VOCABULARY, HIDDEN]``.
    """
    pairs = embeddings.float().view(-1, INTERMEDIATE, HIDDEN).sum(0)
    # The squares of the shares add up to 1, so the rows keep their norm.
    drawn = rows.float() * math.sqrt(1 - 2 * RECALL**2)
    rows.copy_(drawn + pairs.repeat_interleave(2, dim=0) * (RECALL / math.sqrt(HIDDEN)))


def _choose_std(name: str, shape: tuple[int, ...], carrier: int) -> float:
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


def _draw_uniform(seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Uniform float32 values of mean 0 and standard deviation 1."""
    count = math.prod(shape)
    # Four values from each draw of 64 bits, since the draws take most of the time.
    words = torch.empty(-(-count // 4), dtype=torch.int64)
    words.random_(-(2**63), None, generator=make_generator(seed, name))
    integers = words.view(torch.int16)[:count].view(shape)
    return integers.to(torch.float32) * (math.sqrt(3) / 2**15)


def make_generator(seed: int, name: str) -> torch.Generator:
    """Make the random source of the tensor or list called ``name``."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
