"""Text data sets: files, documents, token shards, windows and multiple-choice questions."""
