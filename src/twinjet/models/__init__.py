"""Model families, each one readable file over the ops."""
