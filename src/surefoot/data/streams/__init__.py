"""Streams: data sets that can only be iterated, recorded row by row on a tape whose rows have
numbers.
"""
