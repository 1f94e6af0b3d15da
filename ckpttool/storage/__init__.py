"""Bytes and where they are: stores, locations in them, local files, and CRC-32."""
