"""Services that every process needs. Imports nothing else of the project."""
