"""Preparation: raw text to token files, in numbered tasks that any process can do, repeat or leave unfinished."""
