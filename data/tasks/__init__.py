"""Tasks that test abilities of an attention: generators of sequences whose right answers are known."""

from data.tasks.counting import Counting
from data.tasks.induction import Induction
from data.tasks.mqar import AssociativeRecall
from data.tasks.needle import Needle
from data.tasks.task import Task, TaskData

__all__ = ["TASKS", "Task", "TaskData"]

TASKS: dict[str, Task] = {task.name: task for task in (AssociativeRecall(), Induction(), Needle(), Counting())}
