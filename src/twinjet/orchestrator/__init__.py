"""One place to send requests to, whatever number of engine processes stands behind it."""
