"""The engine process: a loop that holds a scheduler and an engine."""
