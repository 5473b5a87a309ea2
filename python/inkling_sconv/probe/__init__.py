"""What an SGLang tree does, found by running its own classes on CPU tensors.

Nothing here looks at a version: what counts is what the code does.
"""
