"""Triton kernels for what Inductor does in more passes than the memory needs. Import them only where there is a GPU."""
