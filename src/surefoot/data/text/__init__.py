"""Text as tokens: tokens of documents, their cache, token shards, and windows over tokens."""
