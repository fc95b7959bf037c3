"""Snapshots in memory that outlive the worker processes, mirrored on another node."""
