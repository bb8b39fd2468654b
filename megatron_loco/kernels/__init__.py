"""Encode and decode-and-sum behind one schema, with interchangeable backends."""
