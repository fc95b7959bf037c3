"""How one model spreads over many processes."""
