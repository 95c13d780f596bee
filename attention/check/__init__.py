"""Checks whether an attention implementation is correct.

    gpt-attention check my_module:my_attention

cli.py        the command; printing.py prints its lines
subject.py    the implementation under test and how it is called; named.py has implementations with a name
cases.py      one call as plain values; grid.py lists all cases, plan.py orders them by their cost
formula.py    an independent formula for attention and its backward pass, and the rounding errors to expect
judge.py      decides whether an error is rounding; the probe of a training run uses it too
accuracy.py, behaviour.py, dropout.py, system.py    the checks; parts.py runs all but the first
workers.py    the processes in which the checks run
shrink.py, program.py    the smallest case that fails, and the program that shows it
"""
