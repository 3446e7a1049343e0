"""How the arguments of a call are written, a file for each syntax: read as JSON, held by a grammar, and written."""
