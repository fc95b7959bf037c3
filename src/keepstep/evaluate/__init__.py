"""Perplexity, generation and tool-call checks over a forward callable."""
