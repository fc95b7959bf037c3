"""The live page: a read-only server over run folders, and its static files."""
