"""Ways to guess the next tokens: one file per drafter, all behind the protocol in `base.py`."""
