"""Probes of what a model's attention can do, measured with every evaluation: recall tasks, and the loss by position.

A probe has a name, and measures a model: metrics with every evaluation and, after training, the details that a figure
needs. `probes=[mqar,position_loss]` chooses them.
"""
