"""Ledgers of the two analyses that the book takes apart, and beside each the functions that recompute its rows."""
