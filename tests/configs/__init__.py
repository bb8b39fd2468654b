"""Tests of the shipped configurations."""
