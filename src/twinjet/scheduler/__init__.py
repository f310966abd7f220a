"""Who computes what in which step. Host-only: no JAX, no clock of its own, no sockets."""
