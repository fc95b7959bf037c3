"""On-disk formats: what we write, other libraries read, and the reverse."""
