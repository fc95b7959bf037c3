"""What every part may use and nothing knows about training."""
