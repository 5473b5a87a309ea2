"""The shape of the tiny Inkling: its ``config.json``, and the name and shape of every tensor."""

from collections.abc import Iterator, Sequence
from typing import Any

from inkling_sconv.errors import UserError

VOCABULARY = 2048
END_OF_TEXT = VOCABULARY - 1
HIDDEN = 512
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 128
INTERMEDIATE = 1024
EXPERTS, EXPERTS_PER_TOKEN, SHARED_EXPERTS, EXPERT_INTERMEDIATE = 8, 2, 1, 256
D_REL, REL_EXTENT, WINDOW = 16, 1024, 512
KERNEL = 4
CONTEXT = 32768


class OptionError(UserError):
    """Invalid options: no checkpoint can be made."""


def make_config(
    layers: int, mtp_heads: int, local_layers: Sequence[int], moe: bool
) -> dict[str, Any]:
    """Make the content of ``config.json``. The arguments are those of ``write_checkpoint``.

    Raises:
        OptionError: the options contradict each other.
    """
    local = sorted(set(local_layers))
    if not 1 <= mtp_heads <= 8:
        raise OptionError(f"{mtp_heads} MTP heads: 1 to 8 can be made.")
    given = ",".join(map(str, local_layers))
    if not 0 < len(local_layers) == len(set(local) & set(range(layers))):
        raise OptionError(
            f"local layers {given!r}: name one or more from 0 to {layers - 1}, each once."
        )
    dense = layers - 1 if moe else layers
    if not set(range(dense)) - set(local):
        raise OptionError(
            f"local layers {given!r} leave no {'dense ' if moe else ''}layer with full attention; "
            "the MTP heads need one to copy."
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
            # As in released checkpoints. Of heads without a window, SGLang 0.5.21 gives a KV pool
            # to the first one only.
            "mtp_local_layer_ids": [*range(mtp_heads - 1)],
            "mtp_local_extent": REL_EXTENT,
        },
    }


def find_carrier(text: dict[str, Any]) -> int:
    """Find the carrier: the first dense layer with full attention, like an MTP head's block."""
    dense = range(text["dense_mlp_idx"])
    return next(layer for layer in dense if layer not in text["local_layer_ids"])


def list_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield every tensor's name and shape."""
    text = config["text_config"]
    yield "model.llm.embed.weight", (VOCABULARY, HIDDEN)
    yield "model.llm.embed_norm.weight", (HIDDEN,)
    for layer in range(text["num_hidden_layers"]):
        extent = WINDOW if layer in text["local_layer_ids"] else REL_EXTENT
        dense = layer < text["dense_mlp_idx"]
        yield from _list_block_shapes(f"model.llm.layers.{layer}.", extent, dense)
    yield "model.llm.norm.weight", (HIDDEN,)
    yield "model.llm.unembed.weight", (VOCABULARY, HIDDEN)
    for head in range(text["num_nextn_predict_layers"]):
        prefix = f"model.mtp.layers.{head}."
        yield f"{prefix}hidden_norm.weight", (HIDDEN,)
        yield f"{prefix}embed_norm.weight", (HIDDEN,)
        yield f"{prefix}input_proj.weight", (HIDDEN, 2 * HIDDEN)
        yield from _list_block_shapes(f"{prefix}transformer_block.", REL_EXTENT, True)
    yield "model.mtp.chain_norm.weight", (HIDDEN,)


def _list_block_shapes(
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
        # Gate and up rows alternate.
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
