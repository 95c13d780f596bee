"""The report of an arena: differences to the baseline, their intervals, and the verdicts.

results.py  numbers from the runs
race.py     the cost of reaching the baseline's loss
text.py     in sentences
tables.py   in tables
figures.py  in figures
page.py     all of them as a report
"""
