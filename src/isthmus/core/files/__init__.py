"""Read and validate user files; errors carry file and line."""
