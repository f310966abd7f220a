"""Messages between the server process and engine processes, and how they travel."""
