"""The records and files of a run: their writers and readers, and numbers and tables as text."""
