"""One loop for every kind of run: assemble (run), decide when (loop), compute (step)."""
