"""Compiler passes over a program."""
