"""From JSON schemas, regular expressions and tools to EBNF, the one language that the grammar engine reads.

Nothing here knows tokens or needs the grammar engine: that is `engine/constraint.py`'s.
"""
