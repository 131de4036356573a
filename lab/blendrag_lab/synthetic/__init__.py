"""Invented documents and questions about them, by seed."""
