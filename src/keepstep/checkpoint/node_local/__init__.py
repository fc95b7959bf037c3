"""Checkpoints on node-local disks, replicated between nodes."""
