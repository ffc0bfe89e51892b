"""The records and files of a run: who writes them, who reads them, and how numbers and tables are written as text."""
