"""Device arithmetic in torch and Triton. Nothing here knows SGLang.

Each file has one function and its bit-identical reference in plain torch, ``<name>_ref``.
"""
