"""One request from its arrival to its end: its record, its legs and rooms in the ledger, its moves."""
