"""What process_split.py starts, each by `python -m benchmarks.split_roles ROLE`: engine, server and clients."""
