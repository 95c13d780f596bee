"""The tables of README and docs/, printed from bench/results/ into marked blocks of the pages, and their figures.

    make tables                      print every block and draw every figure that is not up to date
    python -m bench.tables --check   only say which are not

A page says where a table goes:

    <!-- generated: attention-speed -->
    <!-- end -->

To add a table:

1. Have its measurements in a result file. A benchmark writes one with `Recorder` (bench/record.py); a run of train.py
   needs a few lines in bench/experiments/cases.py.
2. Write a function with the block's name and its result files, in the module of this folder that fits. It receives the
   rows of each file and returns Markdown:

       @block("softmax", "softmax")
       def softmax(rows: Rows) -> str:
           return pivot(rows, lambda row: row["name"], lambda row: f"{row['length']:,}", lambda row: f"{row['ms']:.2f}")

   "softmax" is read from bench/results/softmax-<GPU>.json, "cpu:generate" from generate-<CPU>.json.
3. Put the two markers into the page and run `make tables`. Check in the page with the result file.
4. Name the command in bench/release/parts.py, so that a release measures it again.

A figure is a function of rows too, under @figure: it returns a Chart, drawn to docs/images/<name>.png and
<name>-dark.png. The block `provenance` of a page is one line: where and when the measurements of its other blocks ran.
tests/bench/test_tables.py fails with the names of blocks and figures that are out of date.
"""
