"""Device arithmetic in torch and Triton. Nothing here knows SGLang.

Each file has one function ``x`` and its reference ``x_ref`` in plain torch, equal to the bit.
"""
