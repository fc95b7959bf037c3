"""Saving and restoring state dicts so that only whole steps exist."""
