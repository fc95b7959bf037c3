"""Models and checkpoints of other systems, in and out: Hugging Face, PEFT, Megatron, DCP."""
