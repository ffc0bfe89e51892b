"""Readers of text: documents, chats, questions, token files; text written as token shards."""
