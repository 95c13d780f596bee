"""Measuring a trained model: tasks of lm-eval, tasks in a file, the loss on any text, and probes.

scorer.py   a model's log-likelihoods and continuations of texts, batched
harness.py  the tasks of EleutherAI's lm-eval, through the scorer
tasks.py    the tasks of a .jsonl file, through the scorer, without lm-eval
text.py     loss and bits per byte on a text
probes.py   the probes of train.py, for a run that has ended
results.py  prints the results, and adds them to the run
"""
