"""Inkling's conv-state tracking, right to the bit, on every SGLang from 0.5.17 on."""

__version__ = "0.2.0"
