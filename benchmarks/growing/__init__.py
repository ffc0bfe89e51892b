"""Costs that grow with a run, its data or its records: one file for each, all of them called by
`costs.py`.
"""
