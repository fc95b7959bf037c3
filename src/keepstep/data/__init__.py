"""From raw text to an exact stream of tokens. Order is pure; only the loader does I/O."""
