"""What figures of all papers share: their look, tables, captions, curves over a rate."""
