"""SGLang's files on disk: finding a tree, asking it, and replacing one of its files safely."""
