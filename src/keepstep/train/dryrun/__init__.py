"""One step of the real model at full world size on one CPU, with fake tensors."""
