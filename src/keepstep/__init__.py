"""keepstep: train large language models and lose no step on the way."""

__version__ = "0.1.0"
