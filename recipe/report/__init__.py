"""The comparison report: run folders in, a verdict, figures and tables out. Needs neither torch nor a GPU."""
