"""What process_split.py starts: the engine, the server and the clients, each by `python -m split_roles ROLE`."""
