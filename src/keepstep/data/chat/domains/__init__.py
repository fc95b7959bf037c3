"""A generated set of tool conversations over many domains: `toolcalls-domains`."""
