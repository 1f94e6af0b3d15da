"""Stores on other machines: the Hugging Face Hub, object stores, and what fsspec knows."""
