"""The tasks of EleutherAI's lm-eval (Gao et al. 2024, "The Language Model Evaluation Harness")."""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from data.errors import brief
from recipe.infer.evaluation.scorer import Scorer
from recipe.run.config import ConfigError

INSTALL = "needs lm-eval; install it with: pip install -e '.[eval]'"


def run_tasks(
    names: Sequence[str | dict[str, Any]], scorer: Scorer, shots: int | None, limit: int | None
) -> dict[str, dict[str, Any]]:
    """The metrics of each task, by its name, as lm-eval computes them.

    names  of lm-eval's tasks and groups of tasks, or descriptions of tasks as its YAML files have them
    shots  examples before each question; None: the task's default
    limit  questions of each task; None: all

    Raises ConfigError for unknown names, and where a task's data cannot be fetched.
    """
    wanted = ",".join(name if isinstance(name, str) else str(name["task"]) for name in names)
    try:
        from lm_eval.api.instance import Instance
        from lm_eval.api.model import LM
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.models.utils import normalize_gen_kwargs
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(f"tasks={wanted} {INSTALL}") from error

    class Adapter(LM):
        """lm-eval's interface to the scorer."""

        tokenizer_name = type(scorer.model).__name__

        def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
            return scorer.loglikelihood([request.args for request in requests])

        def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
            return scorer.loglikelihood_rolling([text for (text,) in (request.args for request in requests)])

        def generate_until(self, requests: list[Instance]) -> list[str]:
            asked = []
            for context, options in (request.args for request in requests):
                options = normalize_gen_kwargs(options)
                if options["do_sample"]:
                    raise ConfigError(
                        f"tasks={wanted} draws at random, and eval.py only decodes greedily; choose other tasks."
                    )
                asked.append((context, options["until"], options["max_gen_toks"]))
            return scorer.generate_until(asked)

    manager = TaskManager()
    check_names([name for name in names if isinstance(name, str)], manager.all_tasks)
    try:
        results = simple_evaluate(
            Adapter(), tasks=list(names), num_fewshot=shots, limit=limit, task_manager=manager, log_samples=False
        )
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # what `datasets` and its network raise
        raise ConfigError(
            f"tasks={wanted} could not be run ({brief(error)}); a task's data comes from the Hugging Face hub, so "
            "connect to the network once, or name a .jsonl file of tasks."
        ) from error
    assert results is not None
    return metrics_of(results)


def check_names(names: Sequence[str], known: Sequence[str]) -> None:
    """Raise ConfigError for the first name that is not among lm-eval's tasks."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = (
                f"did you mean {' or '.join(near)}?"
                if near
                else "lm-eval ls tasks lists them, and a file of tasks ends with .jsonl."
            )
            raise ConfigError(f"tasks={name} is not a task of lm-eval; {hint}")


def metrics_of(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The metrics and the number of questions of each task, from the result of lm-eval's `simple_evaluate`,
    which puts names and N/A between them."""
    counts = results["n-samples"]
    return {
        task: {
            re.sub(",none$", "", metric): value for metric, value in metrics.items() if isinstance(value, int | float)
        }
        | ({"n": counts[task]["effective"]} if task in counts else {})
        for task, metrics in results["results"].items()
    }
