"""Preparation: raw text to tokenised files, cut into numbered tasks that anybody can do, twice, or never finish."""
