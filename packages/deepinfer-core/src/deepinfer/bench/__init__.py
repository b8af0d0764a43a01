"""Measuring offline runs under load: `load` makes requests, `run` times them, `report` and `plot` show the result."""
