"""The files that make up a tokenizer, found in a directory; no tokenizer library is needed.

What it holds is decided by content: a class name in tokenizer_config.json decides nothing.
"""
