"""The contract file format: reading, checking, explaining and writing contract files."""
