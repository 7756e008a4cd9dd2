"""Multi-round sessions: agents and iterative retrieval, with lengths that meet published totals."""
