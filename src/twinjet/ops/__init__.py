"""The operations that models are written in, and their backends."""
