"""Whether what is here does as it should: golden cases, precision, committed results, this machine."""
