"""The referee: is a commit better than the best of a track so far? docs/referee.md has the rules.

A track is records/<track>/track.yaml. The best commit and the edit train in worktrees of their own with the same seeds,
one pair after the other, until the evidence decides (recipe/compare/statistics.py). outputs/referee/<track>/ holds
their runs and the ledger of all edits, with which a judge that was killed goes on.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.atomic import write_atomically
from data.untrusted import UntrustedError, read_json, read_yaml
from recipe.compare.audits import InvalidError, check_paths, faults, result
from recipe.compare.statistics import MOST_PAIRS, NO_GAINS, Calibration, hopeless, log_evidence, log_limit
from recipe.compare.watched import READS
from recipe.errors import UserError
from recipe.files import to_json
from recipe.run.run_folder import CONSOLE, LOCK, last_line, read_summary

RECORDS, LEDGER = Path("records"), "ledger.json"
KEPT, DROPPED, INVALID = "kept", "dropped", "not valid"
# Training is not evaluated, and saves its last weights alone.
OF_JUDGE = [
    "tracking=disabled",
    "training.eval_every=0",
    "training.sample_tokens=0",
    "training.checkpoint_every=1000000000",
]


class RefereeError(UserError):
    """No judgement is possible; the message says what to change."""


@dataclass(frozen=True)
class Track:
    """The rules of a track.

    baseline     the commit that the first edits are compared with
    overrides    of every run; no edit may change them
    editable     files and folders that an edit may change
    budget       the most tokens, seconds, flops and parameters of a run; at least one
    first_seed   of the pairs
    calibration  pairs of the baseline with itself, with other initial weights, from which the noise is known
    salts        whether salt=<n> may draw other initial weights: an edit that changes noise alone
    """

    baseline: str
    overrides: list[str]
    editable: list[str]
    budget: dict[str, float]
    first_seed: int = 1
    calibration: int = 8
    salts: bool = False


@dataclass
class Ledger:
    """All edits of a track, in the order in which they were judged.

    track        digest of its rules
    calibration  degrees of freedom and squares of the noise of a pair; None before it is measured
    """

    track: str
    calibration: list[float] | None = None
    edits: list[dict[str, Any]] = field(default_factory=list)

    @property
    def kept(self) -> list[dict[str, Any]]:
        return [edit for edit in self.edits if edit["verdict"] == KEPT]


class Judge:
    """The judge of a track, with its folder. Use it in a `with` block, which no other judge of the track can enter."""

    def __init__(self, name: str, home: str | None = None) -> None:
        """Raises RefereeError for a track that does not exist or cannot be read."""
        self.top = Path(git(Path.cwd(), "rev-parse", "--show-toplevel"))
        self.name, self.source = name, self.top / RECORDS / name / "track.yaml"
        self.home = Path(home).absolute() if home else self.top / "outputs" / "referee" / name
        try:
            content = read_yaml(self.source)
            self.track: Track = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Track), content))  # type: ignore[assignment]
        except (OSError, UntrustedError, OmegaConfBaseException) as error:
            raise RefereeError(
                f"referee={name}: {self.source} is no track ({str(error).splitlines()[0]}); docs/referee.md shows one."
            ) from error
        self.rules = sha256(to_json(vars(self.track), sort_keys=True).encode()).hexdigest()
        self.lock = FileLock(self.home / ".lock")
        self.ledger = self.read_ledger()

    def read_ledger(self) -> Ledger:
        """The judge's ledger, else the one beside the track, else a new one. Raises RefereeError for other rules."""
        ledger = Ledger(self.rules)
        with suppress(FileNotFoundError):
            places = self.home / LEDGER, self.source.with_name(LEDGER)
            ledger = Ledger(**read_json(next(filter(Path.exists, places), places[0])))
        if ledger.track != self.rules:
            raise RefereeError(f"{self.source} has changed since its first edit was judged; name another out=<folder>.")
        return ledger

    def __enter__(self) -> Judge:
        self.home.mkdir(parents=True, exist_ok=True)
        try:
            self.lock.acquire(timeout=0)
        except Timeout:
            raise RefereeError(f"another judge of {self.name} is at work in {self.home}; wait for its end.") from None
        self.ledger = self.read_ledger()  # another judge may have ended in between
        return self

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    @property
    def best(self) -> dict[str, Any]:
        """The commit and the salt that an edit has to beat."""
        start = {"commit": git(self.top, "rev-parse", f"{self.track.baseline}^{{commit}}"), "salt": 0}
        return (self.ledger.kept or [start])[-1]

    def judge(self, name: str, salt: int = 0) -> dict[str, Any]:
        """The ledger's entry of a commit, judged now or before. Raises RefereeError, and InvalidError by an audit."""
        if salt and not self.track.salts:
            raise InvalidError(f"salt={salt} changes the seed list, and the track {self.name} allows no salts.")
        if name == "HEAD" and git(self.top, "status", "--porcelain", "--untracked-files=no"):
            raise InvalidError("the working tree has changes that no commit holds; commit them, or name a commit.")
        commit = git(self.top, "rev-parse", f"{name}^{{commit}}")
        known = (edit for edit in self.ledger.edits if (edit["commit"], edit["salt"]) == (commit, salt))
        edit = next(known, None) or self.registered(commit, salt)
        if edit["verdict"] == INVALID:
            raise InvalidError(edit["reason"])
        if edit["verdict"] is None:
            try:
                self.decide(edit)
            except InvalidError as error:
                edit |= {"verdict": INVALID, "reason": str(error)}
                self.save()
                raise
        return edit

    def registered(self, commit: str, salt: int) -> dict[str, Any]:
        """A new edit in the ledger, numbered. Raises InvalidError."""
        best = self.best
        check_paths(
            git(self.top, "diff", "--name-only", "--no-renames", best["commit"], commit).splitlines(),
            self.track.editable,
        )
        tree = git(self.top, "rev-parse", f"{commit}^{{tree}}")
        if any((edit["tree"], edit["salt"]) == (tree, salt) for edit in self.ledger.edits):
            raise InvalidError("the same code was judged before; runs are not repeated for a better result.")
        author = git(self.top, "log", "-1", "--format=%an", commit)
        edit = {
            "commit": commit,
            "tree": tree,
            "salt": salt,
            "best": {key: best[key] for key in ("commit", "salt")},
            "keeps": len(self.ledger.kept),
            "pairs": [],
            "verdict": None,
            "reason": "",
            "who": author,
        }
        self.ledger.edits.append(edit)
        self.save()
        return edit

    def decide(self, edit: dict[str, Any]) -> None:
        """Train pairs until the edit is kept or dropped. Raises InvalidError."""
        best, number = edit["best"], self.ledger.edits.index(edit) + 1
        first = self.track.first_seed + MOST_PAIRS * edit["keeps"]
        calibration, limit = self.calibration(best, first), float(log_limit(number, edit["keeps"]))
        gains, seconds, edit["pairs"] = NO_GAINS, 0.0, []
        while edit["verdict"] is None:
            seed = first + gains.n
            theirs, ours = self.run(**best, seed=seed), self.run(edit["commit"], edit["salt"], seed)
            seconds += ours["seconds"]
            if theirs["diverged"]:
                raise RefereeError(f"the best commit diverges with seed {seed}; the track needs another baseline.")
            if fault := next(faults(ours, theirs, self.track.budget), None):
                raise InvalidError(fault)
            gain = math.inf if ours["diverged"] else ours["bits_per_byte"] - theirs["bits_per_byte"]
            same = ours.get("weights") == theirs.get("weights") and gain == 0
            gains = gains if ours["diverged"] or same else gains.add(-gain)
            evidence = float(log_evidence(gains, calibration)) if gains.n > 1 else 0.0
            edit["pairs"].append({"seed": seed, "difference": gain, "log_evidence": evidence})
            told = f", evidence {math.exp(evidence):.3g} of {math.exp(limit):.3g}" if gains.n > 1 else ""
            print(f"pair {seed - first + 1}: {gain:+.5f}{told}", flush=True)
            if same or ours["diverged"]:
                edit |= {"verdict": DROPPED, "reason": "changed nothing" if same else f"diverged with seed {seed}"}
            elif gains.n > 1 and evidence >= limit:
                edit |= {"verdict": KEPT, "reason": f"the evidence reaches {math.exp(limit):.3g}"}
            elif hopeless(gains, calibration) or gains.n == MOST_PAIRS:
                edit |= {"verdict": DROPPED, "reason": f"no gain that {gains.n} pairs show"}
        edit |= {"difference": -gains.mean, "seconds": seconds, "when": datetime.now(UTC).isoformat(timespec="seconds")}
        if gains.n:
            edit["interval"] = [-end for end in reversed(gains.interval())]
            self.ledger.calibration = [float(part) for part in calibration.add(gains)]
        self.save()

    def calibration(self, best: dict[str, Any], first: int) -> Calibration:
        """The noise of a pair: the ledger's, or measured on the best commit with itself and other initial weights."""
        if self.ledger.calibration is None:
            gains = NO_GAINS
            for seed in range(first, first + self.track.calibration):
                plain, salted = self.run(**best, seed=seed), self.run(best["commit"], best["salt"] + 1, seed)
                gains = gains.add(plain["bits_per_byte"] - salted["bits_per_byte"])
                print(f"calibration {gains.n} of {self.track.calibration}: {gains.mean:+.5f} on average", flush=True)
            self.ledger.calibration = [float(part) for part in Calibration().add(gains)] if gains.n else [0.0, 0.0]
            self.save()
        return Calibration(*self.ledger.calibration)

    def run(self, commit: str, salt: int, seed: int) -> dict[str, Any]:
        """What the audits compare of a run (audits.result), trained and measured now or before.

        Raises RefereeError where it failed, and InvalidError where it read the validation text.
        """
        folder = self.home / "runs" / f"{commit[:12]}-{salt}" / str(seed)
        done = folder / "judged.json"
        if done.exists():
            found = read_json(done)
            return found | {"bits_per_byte": float(found["bits_per_byte"])}
        if folder.exists():
            with FileLock(folder / LOCK):  # a judge that was killed may have left its run, which ends first
                shutil.rmtree(folder)
        folder.mkdir(parents=True)
        tree, cache, started = self.worktree(commit), self.home / "tokens", time.monotonic()
        paths = [line.partition("=")[2] for line in self.track.overrides if line.startswith("data.path=")]
        patterns = [f"{cache}/*/val.*", *(f"{os.path.realpath(path)}*" for path in paths)]
        options = [*self.track.overrides, *OF_JUDGE, f"seed={seed}", f"data.cache={cache}", f"hydra.run.dir={folder}"]
        options += [f"init_seed={seed + 1_000_003 * salt}"] if salt else []
        watched = [json.dumps(self.track.editable), json.dumps(patterns)]
        status = python(tree, folder, "recipe.compare.watched", *watched, *options)
        seconds, summary = time.monotonic() - started, dict[str, Any]()
        with suppress(OSError, UntrustedError):
            summary = read_summary(folder)
        if status == READS:
            raise InvalidError(last_line(folder))
        if summary.get("status") != "completed" and summary.get("non_finite_step") is None:
            raise RefereeError(f"the run in {folder} failed: {last_line(folder)}")
        measured = {"bits_per_byte": math.nan}
        if summary["status"] == "completed":
            if python(tree, folder, "recipe.infer.evaluation.audited", str(folder)):
                raise RefereeError(f"the checkpoint in {folder} cannot be evaluated: {last_line(folder)}")
            measured = json.loads(last_line(folder))
        write_atomically(done, to_json(result(summary, measured, seconds), indent=2))
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # a night has hundreds of runs
        self.remove_worktree(commit)
        return self.run(commit, salt, seed)

    def worktree(self, commit: str) -> Path:
        """The files of a commit, and no others: those of an earlier run are removed."""
        tree = self.home / "worktrees" / commit[:12]
        self.remove_worktree(commit)
        git(self.top, "worktree", "add", "--force", "--detach", str(tree), commit)
        return tree

    def remove_worktree(self, commit: str) -> None:
        """Remove a commit's files."""
        shutil.rmtree(self.home / "worktrees" / commit[:12], ignore_errors=True)
        git(self.top, "worktree", "prune")

    def save(self) -> None:
        """Write the ledger."""
        write_atomically(self.home / LEDGER, to_json(vars(self.ledger), indent=1) + "\n")


def git(folder: Path, *arguments: str) -> str:
    """The output of a git command. Raises RefereeError where it fails."""
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RefereeError(
            f"git {' '.join(arguments)} failed: {(done.stderr.strip() or 'it says no more').splitlines()[0]}"
        )
    return done.stdout.strip()


def python(tree: Path, folder: Path, *arguments: str) -> int:
    """Run a module of a worktree, which writes to console.log in the run folder. Returns its status."""
    with (folder / CONSOLE).open("ab") as console:
        return subprocess.call([sys.executable, "-m", *arguments], cwd=tree, stdout=console, stderr=console)
