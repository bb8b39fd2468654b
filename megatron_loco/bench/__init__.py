"""Measurements: gated on correctness, paired with their baseline in one run, with machine and versions printed."""
