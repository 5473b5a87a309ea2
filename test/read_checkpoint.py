"""How the SGLang on ``PYTHONPATH`` reads checkpoints: ``read_checkpoint.py CHECKPOINT...``.

Runs its own config, loader, model classes, tokenizer and KL helpers on a CPU. Prints one JSON line.
Nothing is downloaded: Python's sockets are shut.
"""

import contextlib
import inspect
import json
import socket
import sys
import tempfile
from typing import Any
from unittest.mock import MagicMock

import torch

TEXT = "The capital of France is, Zürich 日本 🙂 \n\t x  y"


def main(checkpoints: list[str]) -> dict[str, Any]:
    # 0.5.17 compiles its MoE kernels with helion, which does not run without a GPU.
    for name in ("helion", "helion.language"):
        sys.modules.setdefault(name, MagicMock())
    with contextlib.suppress(ImportError, AttributeError):
        from sglang.srt.arg_groups import mamba_hook

        # It refuses conv-state checkpoints on a CPU; none is made here.
        mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True
    set_up(checkpoints[0])
    parts = {"target": None, "head 0": 0, "head 1": 1}
    return {
        "models": {
            checkpoint: {part: read_model(checkpoint, head) for part, head in parts.items()}
            for checkpoint in checkpoints
        },
        "tokenizer": read_tokenizer(checkpoints[0]),
        "kl": read_kl_prompts(checkpoints[0]),
    }


def make_server_args(checkpoint: str) -> Any:
    from sglang.srt.server_args import ServerArgs

    options = {"device": "cpu", "attention_backend": "triton", "page_size": 128}
    return ServerArgs(model_path=checkpoint, mamba_radix_cache_strategy="extra_buffer", **options)


def set_up(checkpoint: str) -> None:
    """What a scheduler process has before it builds a model, for one rank."""
    from sglang.srt import runtime_context
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention

    arguments = make_server_args(checkpoint)
    ranks = getattr(runtime_context, "SpawnRanks", None)
    of_ranks = {"ranks": ranks(world_rank=0)} if ranks else {}
    runtime_context.publish(arguments, role="scheduler", **of_ranks)
    store = f"file://{tempfile.mkdtemp()}/store"
    init_distributed_environment(
        world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=store
    )
    initialize_model_parallel()
    # Older releases take the server's arguments before the model's config.
    wanted = len(inspect.signature(initialize_dp_attention).parameters)
    initialize_dp_attention(*(arguments, make_model_config(checkpoint))[-wanted:])


def make_model_config(checkpoint: str, draft: bool = False) -> Any:
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig.from_server_args(make_server_args(checkpoint), is_draft_model=draft)


def read_model(checkpoint: str, head: int | None) -> dict[str, Any]:
    """Load the target, or one MTP head, tensor by tensor."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import get_model_loader
    from sglang.srt.model_loader.utils import get_model_architecture

    config = make_model_config(checkpoint, draft=head is not None)
    choice = {} if head is None else {"draft_model_idx": head}
    loader = get_model_loader(LoadConfig(**choice), config)
    cls, _ = get_model_architecture(config)
    torch.set_default_dtype(config.dtype)
    model = cls(config=config.hf_config, quant_config=None, **choice)
    torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)

    def count_missing_rows() -> int:
        return sum(int(p.reshape(len(p), -1)[:, 0].isnan().sum()) for p in model.parameters())

    used, missing = [], count_missing_rows()
    # Last tensor first: as long as there is no unembedding, the embeddings stand in for it.
    for name, tensor in reversed(list(loader._get_all_weights(config, model))):
        before = missing
        try:
            model.load_weights([(name, tensor)])
        except RuntimeError as error:
            # A head lists the tensors that are still missing.
            if "unloaded" not in str(error):
                raise
        missing = count_missing_rows()
        # A tensor that writes only rows that others have written is not used.
        if missing < before:
            # The loader calls a head's own layer 0.
            used.append(name.replace(".mtp.layers.0.", f".mtp.layers.{head or 0}."))
    return {
        "class": cls.__name__,
        "config": type(config.hf_config).__name__,
        "dtype": str(config.dtype),
        "context": config.context_len,
        "multimodal": config.is_multimodal,
        "end": sorted(config.hf_eos_token_id),
        "nan": [name for name, p in model.named_parameters() if p.isnan().any()],
        "used": used,
    }


def read_tokenizer(checkpoint: str) -> dict[str, Any]:
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    found = get_tokenizer(checkpoint)
    ids = found.encode(TEXT)
    return {
        "size": len(found),
        "end": found.eos_token_id,
        "comma": found.encode(","),
        "text": found.decode(ids),
        "largest": max(ids),
    }


def read_kl_prompts(model: str) -> dict[str, Any]:
    from inkling_sconv.proof.checkpoint import write_kl_prompts
    from sglang.test import kl_test_utils

    paths = [write_kl_prompts(model), write_kl_prompts(model, prompt_tokens=200, samples=5)]
    try:
        prompts = kl_test_utils.get_input_ids(model)
        few = kl_test_utils.get_input_ids(model, max_prompt_tokens=200, num_samples=5)
    finally:
        for path in paths:
            path.unlink()
    lengths = {
        name: [len(texts), min(map(len, texts)), max(map(len, texts))]
        for name, texts in (("default", prompts), ("few", few))
    }
    return {**lengths, "folder": str(paths[0].parent), "largest": max(map(max, prompts))}


def refuse_network(*arguments: Any, **options: Any) -> None:
    raise OSError(f"network use: {arguments}")


if __name__ == "__main__":
    socket.socket.connect = socket.getaddrinfo = refuse_network
    print(json.dumps(main(sys.argv[1:])))
