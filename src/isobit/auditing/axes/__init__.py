"""What a model is run with: batches, padding, decoding, compilation, ranks; and what came out."""
