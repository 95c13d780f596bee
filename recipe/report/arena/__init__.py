"""The report of an arena: differences to the baseline, their intervals, and the verdicts.

results.py  numbers from the runs
text.py     in sentences
tables.py   in tables
figures.py  in figures
page.py     all of them as a report
"""
