"""The same training by several loops, to compare what they cost: each is a function from a
`Training` to its trained model.
"""
