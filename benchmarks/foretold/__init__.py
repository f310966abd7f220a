"""What itl_target.py compares: a forecast's numbers (figures.py), and the same of a running engine (engine.py)."""
