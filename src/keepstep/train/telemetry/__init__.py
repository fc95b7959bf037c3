"""From the numbers of a step to metrics, facts and profiles."""
