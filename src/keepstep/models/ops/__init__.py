"""Operators with a fused GPU form and a plain one: rope, attention, matmul epilogues, add and norm."""
