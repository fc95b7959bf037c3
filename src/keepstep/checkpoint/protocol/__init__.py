"""What makes a checkpoint complete: layout, hashes, manifest, commit marker, parity, retention."""
