"""Rank placement, rendezvous, failure detection, DDP, FSDP, and consistency checks between
ranks.
"""
