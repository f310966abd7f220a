"""Types, configuration and errors that every layer may import; imports nothing of ours."""
