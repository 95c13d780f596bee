"""A night before the referee: each patch is committed on the best commit of the track so far, and judged.

    python -m records.night mini edits/*.patch
    python -m records.night mini salt={2..101}          a hundred edits that change noise alone

The working tree stays as it is. A commit is found under refs/referee/<track>/<name of the patch>.
"""

import os
import sys
import tempfile
from pathlib import Path
from subprocess import CalledProcessError, check_output

import compare
from recipe.compare.referee import Judge

track, *edits = sys.argv[1:]


def committed(patch: str, best: str) -> str:
    """The commit of a patch on the best one, made in an index of its own. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        index = os.environ | {"GIT_INDEX_FILE": f"{folder}/index"}
        name, start = Path(patch).stem, [("read-tree", best), ("apply", "--cached", patch), ("write-tree",)]
        *_, tree = (check_output(["git", *words], env=index, text=True).strip() for words in start)
        commit = check_output(["git", "commit-tree", tree, "-p", best, "-m", name], text=True).strip()
        check_output(["git", "update-ref", f"refs/referee/{track}/{name}", commit])
        return commit


for edit in edits:
    best, salt = Judge(track).best["commit"], edit if edit.startswith("salt=") else "salt=0"
    try:
        commit = best if edit == salt else committed(edit, best)
        status = compare.main([f"referee={track}", f"commit={commit}", salt])
    except CalledProcessError:
        status = 2  # the patch does not apply to the best commit
    print(f"{edit}: {('kept', 'dropped', 'not valid')[status]}", flush=True)
