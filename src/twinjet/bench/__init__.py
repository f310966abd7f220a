"""What `twinjet bench` measures and prints: one engine at work, without text, processes or sockets."""
