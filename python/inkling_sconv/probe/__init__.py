"""Find out what an SGLang tree does by running its own classes on CPU tensors.

Nothing depends on a version.
"""
