"""Saving, snapshots, rollback and what a restart needs to know."""
