"""Saving in the background: a staging copy in shared memory and a writer process."""
