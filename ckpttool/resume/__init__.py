"""Checks that training resumes exactly from a checkpoint: audit, trial, and the recipe of both."""
