"""Defaults, YAML, overrides, checks, then frozen."""
