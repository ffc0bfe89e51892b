"""Tokenizers: bytes, characters, byte-pair encoding and subwords."""
