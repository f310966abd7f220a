"""Between text and token ids: tokenize, chat template, detokenize, stop strings."""
