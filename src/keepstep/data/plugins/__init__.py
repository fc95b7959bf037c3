"""Rows of plug-ins: sequences and streams."""
