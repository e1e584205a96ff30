"""Drafts that read the target's rows: one reader and one graph per family."""
