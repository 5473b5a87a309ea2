"""SGLang's files on disk: finding a tree, examining it, and replacing one file safely."""
