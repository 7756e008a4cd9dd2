"""Whether what is here does as it should: golden cases, precision, this machine."""
