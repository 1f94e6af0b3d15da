"""Bytes and where they are: local files, stores such as the Hugging Face Hub, and CRC-32."""
