"""On-disk formats of token data, compatible with the libraries that define them."""
