"""Bit-exact tracking of Inkling's conv state on SGLang from 0.5.17 on."""

__version__ = "0.2.0"
