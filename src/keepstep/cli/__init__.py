"""The verbs: parse, call one function, print. Nothing here imports torch before a verb needs it."""
