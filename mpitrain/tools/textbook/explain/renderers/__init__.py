"""Renderers of explanations: text for a terminal, pictures, and pages."""
