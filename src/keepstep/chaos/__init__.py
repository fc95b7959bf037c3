"""Fault experiments on a real run: scenarios, soak tests and verdicts."""
