"""Signals, watchdog and guards, polled by the loop."""
