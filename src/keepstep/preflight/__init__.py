"""Checks before a run: this machine, every node, storage."""
