"""What a run learns: the loss of a micro batch, and the metrics that belong to it."""
