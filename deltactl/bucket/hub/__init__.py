"""Buckets of the Hugging Face Hub."""
