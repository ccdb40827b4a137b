"""The example of docs/tasks.md is a task that works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from jaxrl_sync.tasks.protocol import Task, TaskError
from jaxrl_sync.tasks.registry import make_task
from tests.tasks.episodes import single_turn

PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"


def test_the_documented_task_runs_by_its_module_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    (tmp_path / "reverse_example.py").write_text(found.group(1))
    monkeypatch.syspath_prepend(str(tmp_path))
    task: Task = make_task("reverse_example:ReverseTask", {"length": 3})
    train, held_out = task.dataset("train", 0), task.dataset("eval", 0)
    assert train.size == held_out.size == 13 and not set(train) & set(held_out)
    assert task.tokenizer.decode(task.prompt("abc")) == "abc="
    answer = [*task.tokenizer.encode("cba"), *task.stop_token_ids]
    assert task.score(single_turn(task, "abc", answer)).components == {"exact": 1.0}
    assert task.score(single_turn(task, "abc", answer[:2])).value == 0.5
    assert task.environment("abc").step(answer).done and task.sft_examples(3, 0) == []
    with pytest.raises(TaskError, match="'lenght'; did you mean 'length'"):
        make_task("reverse_example:ReverseTask", {"lenght": 3})


@pytest.mark.parametrize("name", ["addition", "reasoning", "guess"])
def test_the_page_names_every_argument(name: str) -> None:
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{name}`"))
    args: Any = type(make_task(name)).Args  # type: ignore[attr-defined]
    assert [a for a in args.__dataclass_fields__ if f"`{a}`" not in row] == []
