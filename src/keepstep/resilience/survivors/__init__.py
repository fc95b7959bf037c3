"""Survivors keep stepping: replicas that outlive the loss of another one. See docs/survivors.md."""
