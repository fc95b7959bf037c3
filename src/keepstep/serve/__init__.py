"""An OpenAI-compatible server for trying and evaluating a model."""
