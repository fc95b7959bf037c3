"""GGUF, the file format of llama.cpp and Ollama, in and out."""
