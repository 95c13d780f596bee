"""Probes of the abilities of a model's attention, measured with every evaluation: recall tasks, and loss by position.

A probe has a name, and measures a model: metrics with every evaluation and, after training, the details that a figure
needs. `probes=[mqar,position_loss]` chooses them.
"""
