"""Pairs of sentences in two languages."""
