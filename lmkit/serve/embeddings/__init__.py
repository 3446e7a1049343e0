"""Embeddings of texts, and what follows from them: a ranking of documents, and scores of pairs (docs/embeddings.md)."""
