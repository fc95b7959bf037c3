"""Plain numbers in; files, terminal lines and pictures out."""
