"""Run Hugging Face transformers models on isobit's operators."""
