"""The tiny Inkling's tokenizer: byte-level BPE, made from scratch."""

import itertools
import string
from typing import Any

from inkling_sconv.proof.architecture import CONTEXT, END_OF_TEXT, VOCABULARY


def make_tokenizer() -> dict[str, Any]:
    """Make ``tokenizer.json``: all text round-trips, all ids decode, some pairs merge."""
    # Byte-level BPE maps unprintable bytes to code points from 256 on.
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
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def make_tokenizer_config() -> dict[str, Any]:
    """Make ``tokenizer_config.json``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
