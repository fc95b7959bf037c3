"""Files that are stored elsewhere: found, downloaded and cached on the node."""
