"""Files of tokens from text: documents, encoding in several processes, and a restartable writer."""
