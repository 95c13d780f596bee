"""From softmax to FlashAttention in runnable steps: `python -m learn` checks each and writes a page to walk through.

memory.py     slow memory, whose every read and write is counted
softmax.py    the ladder for one row of scores: native, safe, online, two passes, one pass, tiles
flash.py      FlashAttention-1 and -2 on matrices, forward and backward
ladder.py     each step measured: reads, memory, overflow, and the effect of leaving a line out
tracing.py    runs a function and records every line: its tiles, its values, the bytes moved
page.py       the page, recorded from the functions above
"""
