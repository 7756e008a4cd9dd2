"""Code that figures of all papers share: their look, tables, captions, and curves over a rate."""
