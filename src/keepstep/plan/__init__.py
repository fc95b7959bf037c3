"""Predictions before a run starts: memory, speed, storage and goodput."""
