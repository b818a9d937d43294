"""The files that users write: read, validated, and refused with file and line."""
