"""Is this attention correct? A judge of any implementation, and the command that asks it.

gpt-attention check my_module:my_attention

cli.py        the command; page.py and html.py print the results
subject.py    the implementation under test: styles.py has its calling convention, known.py those with a name
cases.py      one call as plain values; grid.py has all that are tried, plan.py their order
formula.py    attention and its backward pass once more, and the rounding to expect
judge.py      is a difference rounding? The probe of a training run asks the same judge
accuracy.py, behaviour.py, dropout.py, system.py, gpu.py    the checks; parts.py lists all but the first
workers.py    the processes in which they run
shrink.py, program.py    the smallest case that fails, and the program that shows it
"""
