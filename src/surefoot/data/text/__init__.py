"""Text: files, documents, shards of tokens, windows and multiple-choice questions."""
