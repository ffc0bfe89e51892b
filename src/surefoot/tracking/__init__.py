"""The records and files of a run: writers, readers, and the formatting of values and tables as
text.
"""
