"""Where checkpoints are stored: local folders and object stores."""
