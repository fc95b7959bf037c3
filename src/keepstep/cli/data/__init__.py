"""`keepstep data`."""
