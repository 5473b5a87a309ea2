"""What an SGLang tree does, found by running its own classes on CPU tensors.

No version is compared anywhere.
"""
