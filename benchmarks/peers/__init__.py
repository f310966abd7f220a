"""What benchmarks against other engines share: their programs, and the texts that both read."""
